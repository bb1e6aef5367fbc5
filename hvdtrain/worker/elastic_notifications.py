"""Horovod's notification service for an elastic rank, listening only on the job's interface.

The launcher tells it when hosts come and go. It runs what whoever has its key sends, and Horovod has it listen on every
interface of the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

INTERFACE = "HOROVOD_GLOO_IFACE"


def listen_at_interface() -> None:
    """Call this before the script runs; does nothing where no launcher has named an interface."""
    if INTERFACE not in os.environ:
        return
    from horovod.runner.common.util import network

    network.find_port = _at_interface


def _at_interface(server: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
    """A server of that kind, and its port, as Horovod's `find_port` gives them."""
    from horovod.runner.util.network import get_driver_ip

    started = server((get_driver_ip([os.environ[INTERFACE]]), 0))
    return started, started.server_address[1]
