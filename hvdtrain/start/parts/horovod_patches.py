"""Horovod's launcher modules, and all replacements of their functions. They apply to this process only, and each states
its reason.

LSF support (`--jsrun`) is not loaded: it uses distutils to look for a program, which loads setuptools (0.25 s), and
fails with Python 3.12 or later if setuptools is missing. hvdtrain never uses it.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import signal
import sys
import threading
import types
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any

_without = types.ModuleType("horovod.runner.js_run")
_without.js_run = None  # type: ignore[attr-defined]
_without.is_jsrun_installed = lambda: False  # type: ignore[attr-defined]
sys.modules.setdefault("horovod.runner.js_run", _without)

from horovod.runner import gloo_run, launch, mpi_run  # noqa: E402
from horovod.runner.common.util import env as horovod_env  # noqa: E402
from horovod.runner.common.util import hosts as horovod_hosts  # noqa: E402
from horovod.runner.common.util import safe_shell_exec  # noqa: E402
from horovod.runner.common.util.config_parser import set_env_from_args  # noqa: E402
from horovod.runner.common.util.settings import Settings  # noqa: E402
from horovod.runner.elastic import driver as elastic_driver  # noqa: E402
from horovod.runner.elastic.discovery import FixedHosts  # noqa: E402
from horovod.runner.elastic.settings import ElasticSettings  # noqa: E402
from horovod.runner.util import network, remote  # noqa: E402

from hvdtrain.environment import EXIT_FAILURE, EXIT_SIGNAL_BASE, LAUNCH_ID  # noqa: E402
from hvdtrain.errors import EngineError  # noqa: E402
from hvdtrain.launch.running.outcome import how_it_ended  # noqa: E402
from hvdtrain.launch.running.rank_monitor import MPI_PARAMETER  # noqa: E402
from hvdtrain.launch.secrets import masked  # noqa: E402
from hvdtrain.launch.ssh import BATCH, SSH_FAILED, unseen_keys, where  # noqa: E402
from hvdtrain.signals import shell_code  # noqa: E402
from hvdtrain.start.parts.elastic_driver import (  # noqa: E402
    PatientDriver,
    PatientHosts,
    PatientRegistry,
)
from hvdtrain.start.parts.host_discovery import DiscoveryScript  # noqa: E402
from hvdtrain.start.parts.output_tags import pass_on_marked, tell  # noqa: E402
from hvdtrain.start.parts.rank_helper import RankHelpers  # noqa: E402
from hvdtrain.start.parts.rendezvous import Rendezvous, WorkerNotifier, elastic_handler  # noqa: E402

__all__ = [
    "horovod_hosts",
    "horovods_exportable",
    "launch",
    "network",
    "noted_signals",
    "replace_functions",
    "settle",
    "start_elastic_ranks",
    "start_ranks",
]

ELASTIC_SECONDS = 600
"""Horovod's default for --elastic-timeout."""

horovods_exportable: Callable[[str], bool] = horovod_env.is_exportable
"""Whether Horovod itself forwards a variable to other hosts; it excludes CUDA_VISIBLE_DEVICES, for instance."""

_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")
"""Slower to time out than an agent's connection, which then ends the run and names the host."""

_SIGNALS = range(EXIT_SIGNAL_BASE + 1, EXIT_SIGNAL_BASE + 32)
_SHIFT = 64
_SHIFTED = f"c=$?; [ $c -ne {SSH_FAILED} ] || c={EXIT_SIGNAL_BASE}; "
_SHIFTED += (
    f"[ $c -lt {EXIT_SIGNAL_BASE} ] || [ $c -ge {_SIGNALS.stop} ] || c=$((c + {_SHIFT})); exit $c"
)
"""End of a rank's shell command. It reports a signal that ended the rank by an exit code distinct from those for a
signal that ended the shell itself or ssh, and exit code 255 by one that ssh does not use."""


def settle(arguments: argparse.Namespace, built: Collection[str]) -> None:
    """Complete the arguments of Horovod's launcher.

    Raises:
        EngineError: Horovod was built without the controller that they require.
    """
    if not arguments.hosts and not arguments.host_discovery_script:
        arguments.hosts = (
            horovod_hosts.parse_host_files(arguments.hostfile)
            if arguments.hostfile
            else f"localhost:{arguments.num_proc}"
        )
    arguments.use_gloo = arguments.use_gloo or not (arguments.use_mpi or "mpi" in built)
    wanted = "gloo" if arguments.use_gloo else "mpi"
    if wanted not in built:
        raise EngineError(f"Horovod was built without {wanted}: hvdtrain install-horovod --force")


def start_ranks(arguments: argparse.Namespace, nics: Collection[str] | None) -> None:
    """Run the ranks on hosts that have been checked; with MPI, this process becomes mpirun.

    Horovod's own entry point checks the hosts again. To find common interfaces, it starts a server on every host, which
    runs any command for whoever has its key, and the key appears in a command line. It also imports TensorFlow to learn
    what was built.
    """
    settings = Settings(hosts=arguments.hosts, **_settings(arguments, nics))
    environ = set_env_from_args(os.environ.copy(), arguments)
    if arguments.use_gloo:
        address = network.get_driver_ip(nics)
        gloo_run.gloo_run(settings, nics, environ, address, arguments.command)
    else:
        # The terminal's Ctrl-C is for the supervisor. Before mpirun runs, Python's own handler would leave Horovod
        # waiting for a helper that has ended.
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Horovod runs mpirun below a shell, which forwards no signals and hides how mpirun ended.
        execute = os.execve
        os.execve = lambda sh, argv, env: execute(sh, [*argv[:-1], f"exec {argv[-1]}"], env)  # type: ignore
        # Appears in the command lines of mpirun's daemons on other hosts, where agents look for it.
        environ[f"OMPI_MCA_{MPI_PARAMETER}"] = os.environ[LAUNCH_ID]
        mpi_run.mpi_run(settings, nics, environ, arguments.command)


def start_elastic_ranks(
    arguments: argparse.Namespace,
    interfaces: Callable[[], Collection[str]],
    fit_hosts: Callable[[Any], Any],
) -> None:
    """Run the ranks of an elastic job.

    Horovod's own entry point waits for a second host before it looks for interfaces, even if there is none: on a single
    machine, ten minutes.

    Args:
        arguments: Arguments of Horovod's launcher.
        interfaces: Function that returns the network interfaces, called when they are needed.
        fit_hosts: Function that wraps a host discovery to exclude hosts that cannot run ranks. Horovod would take an
            unreachable host for a worker that failed.
    """
    if arguments.host_discovery_script:
        found: Any = DiscoveryScript(arguments.host_discovery_script, arguments.slots)
    else:
        found = FixedHosts(horovod_hosts.parse_hosts_and_slots(arguments.hosts)[1])
    settings = ElasticSettings(
        discovery=fit_hosts(found),
        min_num_proc=arguments.min_num_proc or arguments.num_proc,
        max_num_proc=arguments.max_num_proc,
        elastic_timeout=arguments.elastic_timeout,
        reset_limit=arguments.reset_limit,
        cooldown_range=arguments.cooldown_range,
        **_settings(arguments, arguments.nics),
    )
    gloo_run.launch_gloo_elastic(
        arguments.command,
        gloo_run._exec_command_fn(settings),
        settings,
        set_env_from_args(os.environ.copy(), arguments),
        lambda driver: interfaces(),
        Rendezvous(lambda: network.get_driver_ip(interfaces())),
        sys.executable,
    )


def noted_signals() -> list[int]:
    """Return a list to which the signals that make this process end its ranks over Gloo will be appended."""
    came: list[int] = []
    register = gloo_run.register_shutdown_event

    def noting() -> Any:
        event = register()

        def note(number: int, frame: FrameType | None) -> None:
            came.append(number)
            event.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)
        return event

    gloo_run.register_shutdown_event = noting
    return came


def _settings(arguments: argparse.Namespace, nics: Collection[str] | None) -> dict[str, Any]:
    """Return the settings that Horovod's launcher derives from its arguments."""
    return {
        "num_proc": arguments.num_proc,
        "verbose": 2 if arguments.verbose else 0,
        "ssh_port": arguments.ssh_port,
        "ssh_identity_file": arguments.ssh_identity_file,
        "extra_mpi_args": arguments.mpi_args,
        "tcp_flag": arguments.tcp_flag,
        "binding_args": arguments.binding_args,
        "output_filename": arguments.output_filename,
        "nics": nics,
        "prefix_output_with_timestamp": arguments.prefix_output_with_timestamp,
    }


def replace_functions(
    arguments: argparse.Namespace, in_command_line: Callable[[str], bool], one_host: bool
) -> None:
    """Replace functions of Horovod that are unsafe or wrong.

    Args:
        arguments: Arguments of Horovod's launcher.
        in_command_line: Predicate on a variable's name: whether the ranks' command contains it (with MPI, its name).
        one_host: Whether all ranks are on this host.
    """
    # Horovod's server listens on every interface and executes what it receives (see `rendezvous`).
    gloo_run.RendezvousServer = lambda verbose: Rendezvous(
        lambda: network.get_driver_ip(arguments.nics)
    )
    gloo_run.create_rendezvous_handler = elastic_handler
    elastic_driver.WorkerNotificationClient = WorkerNotifier

    # Horovod drops the whole host of a failed rank, and with it a job on one host.
    elastic_driver.HostManager = PatientHosts
    elastic_driver.WorkerStateRegistry = PatientRegistry
    gloo_run.ElasticDriver = PatientDriver

    # Ranks of one host use shared memory; Open MPI's TCP, of no use to them, would listen on every interface.
    if one_host:
        mpi_run._OMPI_FLAGS = ["-mca pml ob1", "-mca btl ^openib,tcp"]

    # Horovod accepts every host key, even a changed one, against the user's configuration.
    remote.get_ssh_command = _ssh_command

    # Horovod puts the whole environment into command lines, which everyone on the hosts can read.
    horovod_env.is_exportable = in_command_line

    # With --verbose, Horovod prints its commands, which include the script's arguments.
    for module in (gloo_run, mpi_run):
        module.print = lambda text, **settings: print(masked([text])[0], **settings)

    # Horovod takes log10(size - 1), so --output-filename fails with one rank.
    pad_rank = gloo_run._pad_rank
    gloo_run._pad_rank = lambda rank, size: pad_rank(rank, max(size, 2))

    # A rank may print any bytes, and lines that never end, but Horovod decodes strictly and holds lines back. Commands
    # that Horovod runs for itself have no rank.
    prefix_connection = safe_shell_exec.prefix_connection
    safe_shell_exec.prefix_connection = lambda source, target, name, rank, with_time: (
        prefix_connection(source, target, name, rank, with_time)
        if rank is None
        else pass_on_marked(source, target, name, rank)
    )

    # Horovod mistakes the end of a connection, or of its own helpers, for the end of a rank, or does not notice it.
    safe_shell_exec.multiprocessing = types.SimpleNamespace(get_context=lambda kind: RankHelpers())

    # Over Gloo, all ranks share standard input and compete for it; over MPI it goes to rank 0.
    safe_shell_exec.execute = functools.partial(_execute, safe_shell_exec.execute)


def _execute(
    execute: Callable[..., int],
    command: str,
    *args: Any,
    index: int | None = None,
    events: Sequence[threading.Event] = (),
    **more: Any,
) -> int:
    """Run a shell command with `execute` until one of `events` is set. With `index`, it is the command of that rank."""
    if index is None:
        return execute(command, *args, events=events, **more)
    line = f"{command} < /dev/null" if index else command
    line = line if _host_of(command) else f"{line}; {_SHIFTED}"
    code = execute(line, *args, index=index, events=events, **more)
    asked = any(event.is_set() for event in events)
    code, problem = end_of_rank(code, _host_of(command), index)
    if problem and not asked:
        tell(problem)
    return code


def end_of_rank(code: int, host: str, rank: int) -> tuple[int, str]:
    """Return the exit code of a rank, and a message about what ended instead of it, if anything.

    Args:
        code: Exit code of the shell that ran the rank or its ssh; negative if a signal ended the helper waiting for it.
        host: Host of the rank; empty for this one.
        rank: Number of the rank.
    """
    if code < 0:
        how = how_it_ended(shell_code(code))
        return EXIT_FAILURE, f"Horovod's helper for rank {rank}, which waits for it, {how}"
    broke = f"the connection to host {host} was lost"
    if code in _SIGNALS:
        what = f"{broke}: the local ssh process" if host else "the local shell"
        return EXIT_FAILURE, f"{what} that ran rank {rank} {how_it_ended(code)}"
    if host and code == SSH_FAILED:
        return EXIT_FAILURE, broke
    told = code - _SHIFT
    return (SSH_FAILED if told == EXIT_SIGNAL_BASE else told if told in _SIGNALS else code), ""


def _host_of(command: str) -> str:
    """Return the host in a command of `_ssh_command`; empty for a rank of this host."""
    program, *words = shlex.split(command)
    return words[-2] if program == "ssh" else ""


def _ssh_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """Return a shell command that runs `local_command`, a single quoted word, on the host."""
    options = [
        *BATCH,
        *_ALIVE,
        *unseen_keys(host, port, identity_file),
        *where(port, identity_file),
    ]
    timeout = ["-o", f"ConnectTimeout={timeout_s}"] if timeout_s is not None else []
    (line,) = shlex.split(local_command)
    # exec replaces the login shell: a rank recognizes its connection by the processes above it (`launcher_watch`).
    remote = f"exec sh -c {shlex.quote(f'{line}; {_SHIFTED}')}"
    return shlex.join(["ssh", *options, *timeout, host, remote])
