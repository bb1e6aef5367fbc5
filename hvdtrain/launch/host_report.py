"""What another host reports about itself before a launch, or why it could not. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hvdtrain.launch.ssh_errors import SSH_FAILED, explain_ssh

THIS_HOST = ""
"""Stands for the launcher's own host among the names of hosts."""

Interfaces = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class HostReport:
    """What a host reports about itself.

    Attributes:
        hvdtrain: version of hvdtrain there.
        python: version of Python there.
        interfaces: its network interfaces with their IPv4 addresses.
        reached: its address that ssh reached, and the address ssh came from; empty if unknown.
    """

    hvdtrain: str
    python: str
    interfaces: Interfaces
    reached: str = ""
    origin: str = ""


def report_of(told: Mapping[str, Any]) -> HostReport:
    """The report that a host sent. Ignores unknown fields; raises TypeError if some are missing."""
    known = {one.name for one in fields(HostReport)}
    return HostReport(**{name: value for name, value in told.items() if name in known})


_NO_PYTHON = re.compile(r"no such file or directory|not found|permission denied", re.IGNORECASE)
_NO_MODULE = re.compile(r"No module named '?(?P<name>[\w.]+)")


def ssh_problem(
    host: str,
    exit_code: int,
    stderr: str,
    python: str,
    port: int | None = None,
    identity_file: str | None = None,
) -> str:
    """Why a host did not report, and what to do.

    Args:
        host: its name.
        exit_code: of ssh; less than 0: a signal ended it.
        stderr: what ssh and the remote command said.
        python: the interpreter that the ranks are to run with.
        port, identity_file: that ssh was given.
    """
    if exit_code < 0:
        return f"host {host}: the local ssh process connected to it was ended by {signal.Signals(-exit_code).name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = lines[-1] if lines else f"exit code {exit_code}, with no output"
    if exit_code == SSH_FAILED:
        error = explain_ssh(host, stderr, port, identity_file)
        return f"host {host}: {error.cause}: {error.fix}"
    if exit_code in (126, 127) and _NO_PYTHON.search(stderr):
        return (
            f"host {host}: there is no Python at {python}: every host needs the same environment at "
            "the same path (a shared folder, or an installation on each)"
        )
    module = _NO_MODULE.search(stderr)
    if module:
        return (
            f"host {host}: {python} has no module {module['name']} there: install the same "
            "environment on every host"
        )
    return f"host {host}: {python} failed there: {said}"


def late(host: str, seconds: float) -> str:
    """The message about a host that does not report in time, whether or not it answers ssh."""
    return (
        f"host {host}: no answer over ssh within {seconds:g} s: it may be overloaded or its network slow; "
        "--start-timeout sets a longer limit"
    )


def differences(host: str, report: HostReport, own: HostReport) -> str:
    """Why a host cannot run ranks together with this one; empty if it can."""
    if report.hvdtrain != own.hvdtrain:
        return (
            f"host {host} has hvdtrain {report.hvdtrain}, this host has {own.hvdtrain}: install the same "
            "version on every host"
        )
    if report.python.split(".")[:2] != own.python.split(".")[:2]:
        return (
            f"host {host} has Python {report.python}, this host has {own.python}: install the same version on "
            "every host"
        )
    return ""


def missing_interfaces(wanted: Sequence[str], reports: Mapping[str, HostReport]) -> str:
    """Which hosts have none of the requested interfaces, and which they have; empty if all have one."""
    problems = [
        f"{f'host {host}' if host else 'this host'} has no network interface "
        f"{' or '.join(wanted)}: it has "
        + (", ".join(sorted(name for name in report.interfaces if name != "lo")) or "none")
        for host, report in reports.items()
        if not any(report.interfaces.get(name) for name in wanted)
    ]
    return "\n".join(problems) and "\n".join(
        [*problems, "name interfaces that every host has with --network-interfaces"]
    )


NO_COMMON_INTERFACE = (
    "the hosts are not connected by an interface of the same name on each: name one that "
    "every host has, and that connects them, with --network-interfaces"
)


def common_interface(own: HostReport, others: Sequence[HostReport]) -> str:
    """The interface over which ssh reaches every host, if it has the same name everywhere; else the only one that all
    hosts have with an address of their own, or empty."""
    names = {_interface_of(report.interfaces, report.reached) for report in others}
    names |= {_interface_of(own.interfaces, report.origin) for report in others}
    if len(names) != 1:
        names = _on_every_host([own.interfaces, *(report.interfaces for report in others)])
    return names.pop() if len(names) == 1 else ""


def loopback_interfaces(own: HostReport) -> set[str]:
    """The interfaces with the address 127.0.0.1."""
    return {name for name, has in own.interfaces.items() if "127.0.0.1" in has}


def _on_every_host(hosts: Sequence[Interfaces]) -> set[str]:
    """Names that all hosts have, with different addresses: a bridge for containers has the same on each."""
    common = set.intersection(*(set(interfaces) for interfaces in hosts))
    return {
        name
        for name in common
        if all(interfaces[name] for interfaces in hosts)
        and len({interfaces[name][0] for interfaces in hosts}) == len(hosts)
    }


def _interface_of(interfaces: Interfaces, address: str) -> str:
    return next((name for name, has in interfaces.items() if address in has), "")
