"""Restrict Horovod's notification service of an elastic rank to the job's network interface.

The launcher tells the service when hosts come and go. Whoever has its key can make it run code, and by default Horovod
lets it listen on every interface of the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hvdtrain.rank_variables import GLOO_INTERFACE


def listen_at_interface() -> None:
    """Restrict the service, if the launcher has named an interface. To be called before the script runs."""
    if GLOO_INTERFACE not in os.environ:
        return
    from horovod.runner.common.util import network

    network.find_port = _at_interface


def _at_interface(server: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
    """Start `server`; return it with its port, like Horovod's `find_port`."""
    from horovod.runner.util.network import get_driver_ip

    started = server((get_driver_ip([os.environ[GLOO_INTERFACE]]), 0))
    return started, started.server_address[1]
