"""What `hvdtrain.start.horovodrun` does: Horovod's launcher, told what it would have to ask."""

from __future__ import annotations

import argparse
import codecs
import functools
import os
import re
import shlex
import shutil
import sys
import traceback
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hvdtrain.environment import EXIT_FAILURE, EXIT_USAGE, LAUNCH_ID
from hvdtrain.launch.engine import find_engine
from hvdtrain.launch.host_report import THIS_HOST, HostReport, common_interface, missing_interfaces
from hvdtrain.launch.passing import looks_secret, travelling
from hvdtrain.launch.variables import without_value
from hvdtrain.start.horovods import (
    gloo_run,
    horovod_env,
    horovod_hosts,
    launch,
    network,
    safe_shell_exec,
)
from hvdtrain.start.keeper import own_report
from hvdtrain.start.keepers import Keepers, Reach, keeper_argv, missing_program
from hvdtrain.start.supervise import supervise

START_SECONDS = 30
"""Horovod's default for --start-timeout."""
_PATH_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")


def launch_ranks(arguments: Sequence[str]) -> int:
    """Launch with the arguments of `hvdtrain.start.horovodrun`; returns the exit code."""
    own, horovods = split_arguments(arguments)
    asked = own_arguments(own)
    if missing := without_value(asked, os.environ):
        print(f"hvdtrain: {missing}", file=sys.stderr)
        return EXIT_USAGE
    sys.argv = ["horovodrun", *horovods]
    parsed = launch.parse_args()
    launch_id = os.environ.setdefault(LAUNCH_ID, uuid.uuid4().hex)
    remote = _remote_hosts(parsed)
    reach = _reach(parsed)
    if missing := missing_program(keeper_argv(host, launch_id, reach) for host in remote):
        print(f"hvdtrain: {missing}", file=sys.stderr)
        return EXIT_FAILURE
    with Keepers(remote, launch_id, reach) as keepers:
        problems = _prepare(parsed, remote, keepers, asked)
        if problems:
            for line in "\n".join(problems).splitlines():
                print(f"hvdtrain: {line}", file=sys.stderr)
            return EXIT_FAILURE
        _teach_horovod(parsed, asked, checked=bool(remote))
        return supervise(lambda: _run_horovod(parsed), launch_id, keepers)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first `--`."""
    if "--" not in arguments:
        sys.exit("usage: python -m hvdtrain.start.horovodrun [--env NAME]... -- OPTIONS COMMAND...")
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def own_arguments(arguments: Sequence[str]) -> frozenset[str]:
    """The names that `--env` asks for."""
    parser = argparse.ArgumentParser(prog="hvdtrain.start.horovodrun")
    parser.add_argument("--env", action="append", default=[], metavar="NAME")
    return frozenset(parser.parse_args(arguments).env)


def exit_code_of(error: Exception) -> int:
    """The exit code of the rank that ended first, where Horovod's error names it; else 1."""
    found = re.search(r"^Exit code: (\d+)", str(error), re.MULTILINE)
    return (int(found[1]) & 0xFF or EXIT_FAILURE) if found else EXIT_FAILURE


def _remote_hosts(arguments: argparse.Namespace) -> list[str]:
    """The hosts that need a keeper. Those of an elastic job come and go: it has none."""
    if _is_elastic(arguments) or not arguments.hosts:
        return []
    names, _ = horovod_hosts.parse_hosts_and_slots(arguments.hosts)
    remote: list[str] = network.filter_local_addresses(names)
    return remote


def _is_elastic(arguments: argparse.Namespace) -> bool:
    return bool(arguments.host_discovery_script or arguments.min_num_proc)


def _reach(arguments: argparse.Namespace) -> Reach:
    return Reach(
        python=arguments.command[0] if arguments.command else sys.executable,
        path_variables={name: os.environ[name] for name in _PATH_VARIABLES if name in os.environ},
        port=arguments.ssh_port,
        identity_file=arguments.ssh_identity_file,
        seconds=arguments.start_timeout
        or int(os.environ.get("HOROVOD_START_TIMEOUT", START_SECONDS)),
    )


def _prepare(
    arguments: argparse.Namespace, remote: Sequence[str], keepers: Keepers, asked: Iterable[str]
) -> list[str]:
    """Ask the other hosts, and settle what depends on them; returns what is wrong."""
    if _is_elastic(arguments):
        return []
    own = own_report()
    if not remote:
        wrong = missing_interfaces(arguments.nics, {THIS_HOST: own}) if arguments.nics else ""
        arguments.nics = None  # Ranks of one host meet on its loopback interface.
        return [wrong] if wrong else []
    secrets = {
        name: value
        for name, value in travelling(os.environ, asked).items()
        if arguments.use_gloo and looks_secret(name, value)
    }
    reports, problems = keepers.reports(secrets, own)
    if problems:
        return problems
    if arguments.nics:
        wrong = missing_interfaces(sorted(arguments.nics), _named(arguments, own) | reports)
        if wrong:
            return [wrong]
    elif interface := common_interface(own, list(reports.values())):
        arguments.nics = {interface}
    if not arguments.use_gloo:
        prefix = _mpi_prefix()
        if prefix and "--prefix" not in (arguments.mpi_args or ""):
            # ssh starts with a bare PATH, in which the other hosts' mpirun is not found.
            arguments.mpi_args = f"{arguments.mpi_args or ''} --prefix {shlex.quote(prefix)}"
    return []


def _named(arguments: argparse.Namespace, own: HostReport) -> dict[str, HostReport]:
    """This host's report, if the launch uses its interfaces: Gloo's ranks meet here."""
    names, _ = horovod_hosts.parse_hosts_and_slots(arguments.hosts)
    has_ranks = len(network.filter_local_addresses(names)) < len(names)
    return {THIS_HOST: own} if arguments.use_gloo or has_ranks else {}


def _mpi_prefix() -> str:
    """The folder in which the mpirun of PATH is installed, if it is Open MPI 4; else empty."""
    mpirun = shutil.which("mpirun")
    prefix = Path(mpirun).parent.parent if mpirun else None
    return str(prefix) if prefix and (prefix / "bin" / "orted").exists() else ""


def _teach_horovod(arguments: argparse.Namespace, asked: frozenset[str], checked: bool) -> None:
    """Answer Horovod's questions, in this process only."""
    built = find_engine().built
    launch.mpi_built = lambda verbose=False: "mpi" in built
    launch.gloo_built = lambda verbose=False: "gloo" in built
    launch.parse_args = lambda: arguments
    if checked:
        launch._check_all_hosts_ssh_successful = lambda *_, **__: True

    # The logarithm of (size - 1): --output-filename fails with one rank.
    pad_rank = gloo_run._pad_rank
    gloo_run._pad_rank = lambda rank, size: pad_rank(rank, max(size, 2))

    # An elastic job waits for a second host before it looks for interfaces, also where there is
    # none: ten minutes, on one machine.
    gloo_run._get_min_start_hosts = lambda settings: (
        1 if settings.nics or not _discovered_elsewhere(settings) else 2
    )

    exportable = horovod_env.is_exportable

    def may_travel(name: str) -> bool:
        if arguments.use_gloo and looks_secret(name, os.environ.get(name, "")):
            return False
        return name in asked or (exportable(name) and bool(travelling({name: ""}, ())))

    horovod_env.is_exportable = may_travel

    # A rank may print any bytes; a strict decoder would end the thread that reads them.
    lenient = functools.partial(codecs.getincrementaldecoder("utf8"), errors="surrogateescape")
    safe_shell_exec.codecs = SimpleNamespace(getincrementaldecoder=lambda name: lenient)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]


def _discovered_elsewhere(settings: Any) -> list[str]:
    """The other hosts that an elastic job has now; `settings` are Horovod's."""
    remote: list[str] = network.filter_local_addresses(
        list(settings.discovery.find_available_hosts_and_slots())
    )
    return remote


def _run_horovod(arguments: argparse.Namespace) -> int:
    """Horovod's launcher; over MPI this process becomes mpirun."""
    try:
        launch.run_commandline()
        return 0
    except Exception as error:
        if arguments.verbose:
            traceback.print_exc()
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return exit_code_of(error)
