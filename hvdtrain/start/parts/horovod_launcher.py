"""Implementation of `hvdtrain.start.run_horovod`: run Horovod's launcher with what it would have to find out."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import re
import shutil
import sys
import traceback
import uuid
from collections.abc import Collection, Sequence

from hvdtrain.environment import EXIT_FAILURE, FORWARD, LAUNCH_ID
from hvdtrain.errors import HvdtrainError, exit_code_of
from hvdtrain.launch.env_forwarding import acts_at_start, forwarded, require_values, travelling
from hvdtrain.launch.host_report import (
    NO_COMMON_INTERFACE,
    THIS_HOST,
    HostReport,
    common_interface,
    loopback_interfaces,
    missing_interfaces,
)
from hvdtrain.launch.installed_horovod import installed_controllers
from hvdtrain.launch.running.time_limits import START_SECONDS
from hvdtrain.launch.secrets import looks_secret
from hvdtrain.start.parts.agents import (
    Agents,
    SshSettings,
    agent_argv,
    greet,
    missing_program,
    reach_by,
)
from hvdtrain.start.parts.elastic_hosts import ElasticAgents, ElasticHosts, FitHosts
from hvdtrain.start.parts.horovod_patches import (
    ELASTIC_SECONDS,
    horovod_hosts,
    horovods_exportable,
    launch,
    network,
    noted_signals,
    replace_functions,
    settle,
    start_elastic_ranks,
    start_ranks,
)
from hvdtrain.start.parts.host_agent import Greeting, own_report
from hvdtrain.start.parts.supervisor import supervise

_INTERFACES = "NCCL_SOCKET_IFNAME"
"""Horovod sets this in the command, after the user's own value."""
_ROOM = 100_000
"""Maximum bytes of variables in a command, which is limited to 128 kB."""


def launch_ranks(arguments: Sequence[str]) -> int:
    """Launch with the arguments of horovodrun, and return the exit code.

    Raises:
        HvdtrainError: The launch cannot start, here or on another host.
    """
    asked = forwarded(os.environ)
    os.environ.pop(FORWARD, None)
    require_values(asked, os.environ)
    sys.argv = ["horovodrun", *arguments]
    parsed = launch.parse_args()
    settle(parsed, installed_controllers())
    launch_id = os.environ.setdefault(LAUNCH_ID, uuid.uuid4().hex)
    remote = _remote_hosts(parsed)
    seconds = parsed.start_timeout or int(os.environ.get("HOROVOD_START_TIMEOUT") or START_SECONDS)
    reach = reach_by(parsed, seconds)
    if missing := missing_program([["ssh"]] if remote else []):
        raise HvdtrainError(missing)
    commands = {host: agent_argv(host, launch_id, reach) for host in remote}
    elastic = ElasticAgents(launch_id, reach) if _is_elastic(parsed) else None
    with elastic or Agents(commands, os.environ) as agents:
        problems = [] if elastic else _prepare(parsed, agents, reach, asked)
        if problems:
            raise HvdtrainError("\n".join(problems))
        brought, unfit = _brought(parsed, asked), _too_long(parsed, asked)
        limit = parsed.elastic_timeout or ELASTIC_SECONDS
        hosts = ElasticHosts(elastic, brought, parsed.nics, limit, unfit) if elastic else None
        one_host = not elastic and not remote
        shown = functools.partial(in_command_line, parsed, asked, one_host=one_host)
        replace_functions(parsed, shown, one_host)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        run = functools.partial(_run_horovod, parsed, hosts)
        return supervise(lambda: exit_code_of(run), launch_id, agents)


def code_in(error: Exception) -> int:
    """Return the exit code of the rank that ended first, if Horovod's error contains it; otherwise 1."""
    found = re.search(r"^Exit code: (\d+)", str(error), re.MULTILINE)
    return (int(found[1]) & 0xFF or EXIT_FAILURE) if found else EXIT_FAILURE


def _remote_hosts(arguments: argparse.Namespace) -> list[str]:
    """Return the hosts that need an agent from the start. Those of an elastic job join later."""
    if _is_elastic(arguments) or not arguments.hosts:
        return []
    names, _ = horovod_hosts.parse_hosts_and_slots(arguments.hosts)
    remote: list[str] = network.filter_local_addresses(names)
    return remote


def _is_elastic(arguments: argparse.Namespace) -> bool:
    return bool(arguments.host_discovery_script or arguments.min_num_proc)


def in_command_line(
    arguments: argparse.Namespace, asked: Collection[str], name: str, *, one_host: bool = False
) -> bool:
    """Return whether a variable is passed to the ranks in the command that starts them. With MPI, only its name is.

    A command is limited to 128 kB, so it contains only what a rank needs when its interpreter starts, and Horovod's
    options, which become variables only in its launcher. On other hosts, agents deliver the rest; on this one, ranks
    inherit it.
    """
    if not _travels(asked, name):
        return False
    if arguments.use_gloo and looks_secret(name, os.environ.get(name, "")):
        return False
    if name.startswith("HOROVOD_"):
        return name not in asked
    at_start = acts_at_start(name) or name == _INTERFACES
    return at_start and not (one_host and name in os.environ)


def _travels(asked: Collection[str], name: str) -> bool:
    return bool(travelling({name: ""}, asked)) and (name in asked or horovods_exportable(name))


def _prepare(
    arguments: argparse.Namespace, agents: Agents, reach: SshSettings, asked: Collection[str]
) -> list[str]:
    """Query the other hosts, and complete the arguments accordingly. Returns the problems."""
    own = own_report()
    if not agents.hosts:
        wrong = missing_interfaces(arguments.nics, {THIS_HOST: own}) if arguments.nics else ""
        if not any(map(shutil.which, ("ssh", "rsh"))):
            # Open MPI gives up without either, before it finds out that all ranks are local.
            os.environ.setdefault("OMPI_MCA_plm", "isolated")
        # Ranks of one host communicate over its loopback interface.
        arguments.nics = loopback_interfaces(own)
        return [wrong] if wrong else []
    if too_long := _too_long(arguments, asked):
        return [too_long]
    greetings = dict.fromkeys(agents.hosts, Greeting(secrets=_brought(arguments, asked)))
    answers = greet(agents, greetings, own, reach=reach)
    if answers.problems:
        return list(answers.problems.values())
    reports = dict(answers.reports)
    if arguments.nics:
        wrong = missing_interfaces(sorted(arguments.nics), _named(arguments, own) | reports)
        if wrong:
            return [wrong]
    elif interface := common_interface(own, list(reports.values())):
        arguments.nics = {interface}
    elif arguments.use_gloo:
        return [NO_COMMON_INTERFACE]
    return []


def _too_long(arguments: argparse.Namespace, asked: Collection[str]) -> str:
    """Return an error message if the variables that must be in a command do not fit. Empty if they do."""
    sizes = {
        name: len(name) + (len(value.encode(errors="replace")) if arguments.use_gloo else 0)
        for name, value in os.environ.items()
        if in_command_line(arguments, asked, name)
    }
    if sum(sizes.values()) <= _ROOM:
        return ""
    longest = max(sizes, key=lambda name: sizes[name])
    return (
        f"the {len(sizes)} environment variables for workers on other hosts take {sum(sizes.values())} bytes, "
        f"but a command line has room for {_ROOM}: unset some, or shorten the longest, {longest} "
        f"({sizes[longest]} bytes)"
    )


def _brought(arguments: argparse.Namespace, asked: Collection[str]) -> dict[str, str]:
    """Return the variables that agents pass to the ranks of their hosts."""
    return {
        name: value
        for name, value in os.environ.items()
        if _travels(asked, name) and not in_command_line(arguments, asked, name)
    }


def _named(arguments: argparse.Namespace, own: HostReport) -> dict[str, HostReport]:
    """Return this host's report if the launch uses its interfaces; Gloo's ranks connect to it for their rendezvous."""
    names, _ = horovod_hosts.parse_hosts_and_slots(arguments.hosts)
    has_ranks = len(network.filter_local_addresses(names)) < len(names)
    return {THIS_HOST: own} if arguments.use_gloo or has_ranks else {}


def _run_horovod(arguments: argparse.Namespace, hosts: ElasticHosts | None) -> int:
    """Run Horovod's launcher, or become mpirun. Returns the exit code, or -N if signal N ended the launcher."""
    received = noted_signals()
    try:
        if arguments.log_level:
            logging.addLevelName(logging.NOTSET, "TRACE")
            logging.basicConfig(level=logging.getLevelName(arguments.log_level))
        if hosts is None:
            start_ranks(arguments, arguments.nics)
        else:
            with hosts:
                start_elastic_ranks(
                    arguments, hosts.interfaces, lambda found: FitHosts(found, hosts)
                )
        return -received[0] if received else 0
    except HvdtrainError:
        raise
    except Exception as error:
        if arguments.verbose:
            traceback.print_exc()
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return -received[0] if received else code_in(error)
