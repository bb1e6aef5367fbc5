"""Horovod's launcher modules, and all of their functions that are replaced, in this process only, each with its reason.

Loaded without the part for LSF (`--jsrun`): it asks distutils for a program's path, which loads setuptools (0.25 s),
and fails where Python 3.12 or later has none. hvdtrain never asks for it.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

_without = types.ModuleType("horovod.runner.js_run")
_without.js_run = None  # type: ignore[attr-defined]
_without.is_jsrun_installed = lambda: False  # type: ignore[attr-defined]
sys.modules.setdefault("horovod.runner.js_run", _without)

from horovod.runner import gloo_run, launch, mpi_run  # noqa: E402
from horovod.runner.common.util import env as horovod_env  # noqa: E402
from horovod.runner.common.util import hosts as horovod_hosts  # noqa: E402
from horovod.runner.common.util import safe_shell_exec  # noqa: E402
from horovod.runner.driver import driver_service  # noqa: E402
from horovod.runner.elastic import driver as elastic_driver  # noqa: E402
from horovod.runner.util import network, remote  # noqa: E402

from hvdtrain.launch.passing import masked  # noqa: E402
from hvdtrain.launch.ssh import BATCH, unseen_keys, where  # noqa: E402
from hvdtrain.start.marks import pass_on_marked  # noqa: E402
from hvdtrain.start.rendezvous import Rendezvous, WorkerNotifier, elastic_handler  # noqa: E402

__all__ = ["horovod_hosts", "horovods_exportable", "launch", "network", "replace_functions"]

horovods_exportable: Callable[[str], bool] = horovod_env.is_exportable
"""Whether Horovod itself lets a variable go to other hosts; it keeps CUDA_VISIBLE_DEVICES here, for instance."""

_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")
"""Longer than an agent's connection, whose end tells what has happened: ssh's own exit code does not."""


def replace_functions(
    arguments: argparse.Namespace,
    built: Collection[str],
    in_command_line: Callable[[str], bool],
    interfaces: Callable[[], Collection[str]],
    one_host: bool,
    patience: float = 0.0,
    fit_hosts: Callable[[Any], Any] | None = None,
) -> None:
    """Replace what Horovod would ask anew, does unsafely, or gets wrong.

    Args:
        arguments: of Horovod's launcher.
        built: the controllers that Horovod was built with.
        in_command_line: whether the variable of a name goes to the ranks as part of their command (over MPI, its name).
        interfaces: those to communicate over, once they are asked for.
        one_host: whether all ranks are on this host.
        patience: seconds for all ranks of an elastic job to meet again after their number changed.
        fit_hosts: a discovery of hosts -> one that leaves out what cannot run ranks; for elastic jobs.
    """
    # Horovod imports TensorFlow in a process of its own to find out: 3 to 4 s.
    launch.mpi_built = lambda verbose=False: "mpi" in built
    launch.gloo_built = lambda verbose=False: "gloo" in built

    # The arguments were parsed, and what depends on the hosts was settled in them.
    launch.parse_args = lambda: arguments

    # The hosts were asked all at once. Horovod tries ssh five times, and finds the interfaces by servers on every host
    # which run any command for whoever has their key, and that stands in a command line.
    launch._check_all_hosts_ssh_successful = lambda *_, **__: True
    driver_service.get_common_interfaces = lambda *_, **__: interfaces()

    # An elastic job waits for a second host before it looks for interfaces, also where there is none: ten minutes, on
    # one machine. And it starts workers on hosts that cannot be reached, and takes them for failures.
    if fit_hosts is not None:
        host_manager = elastic_driver.HostManager
        elastic_driver.HostManager = lambda found, *rest: host_manager(fit_hosts(found), *rest)
        gloo_run._get_min_start_hosts = lambda settings: 1

    # Horovod's server listens on every interface and runs what it receives (see `rendezvous`).
    gloo_run.RendezvousServer = functools.partial(
        Rendezvous, lambda: network.get_driver_ip(interfaces()), patience
    )
    gloo_run.create_rendezvous_handler = elastic_handler
    elastic_driver.WorkerNotificationClient = WorkerNotifier

    # Ranks of one host speak through its memory; Open MPI's TCP, of no use to them, would listen on every interface.
    if one_host:
        mpi_run._OMPI_FLAGS = ["-mca pml ob1", "-mca btl ^openib,tcp"]

    # Horovod accepts every host key, also one that has changed, and against the user's configuration.
    remote.get_ssh_command = _ssh_command

    # Horovod puts all of the environment into command lines, which everybody on the hosts can read.
    horovod_env.is_exportable = in_command_line

    # With --verbose Horovod prints its commands, which end with the script's own arguments.
    for module in (gloo_run, mpi_run):
        module.print = lambda text, **settings: print(masked([text])[0], **settings)

    # The logarithm of (size - 1): --output-filename fails with one rank.
    pad_rank = gloo_run._pad_rank
    gloo_run._pad_rank = lambda rank, size: pad_rank(rank, max(size, 2))

    # A rank may print any bytes, and lines that never end. Horovod decodes strictly and holds lines back; what it runs
    # for itself is no rank.
    prefix_connection = safe_shell_exec.prefix_connection
    safe_shell_exec.prefix_connection = lambda source, target, name, rank, with_time: (
        prefix_connection(source, target, name, rank, with_time)
        if rank is None
        else pass_on_marked(source, target, name, rank)
    )

    # Over Gloo all ranks share the input, and each takes what it finds there; over MPI it is rank 0's.
    safe_shell_exec.execute = functools.partial(_execute, safe_shell_exec.execute)


def _execute(
    execute: Callable[..., int], command: str, *args: Any, index: int | None = None, **more: Any
) -> int:
    """`execute` has a shell run `command`; with `index` it is that rank's."""
    return execute(f"{command} < /dev/null" if index else command, *args, index=index, **more)


def _ssh_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """A line for a shell; `local_command` is quoted already."""
    options = [
        *BATCH,
        *_ALIVE,
        *unseen_keys(host, port, identity_file),
        *where(port, identity_file),
    ]
    timeout = ["-o", f"ConnectTimeout={timeout_s}"] if timeout_s is not None else []
    # A shell runs its last command in its own place, and where a signal ends that, ssh says 255 and not which.
    return f"{shlex.join(['ssh', *options, *timeout, host])} {local_command} '; exit'"
