"""Interpret what other hosts report before a launch, or why a report is missing. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hvdtrain.launch.ssh import SSH_FAILED, explain_ssh

THIS_HOST = ""
"""Name of the launcher's own host in mappings by host name."""

Interfaces = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class HostReport:
    """Properties of a host, reported by the host itself.

    Attributes:
        hvdtrain: Version of hvdtrain.
        python: Version of Python.
        interfaces: Network interfaces with their IPv4 addresses.
        reached: Address of the host at which ssh reached it; empty if unknown.
        origin: Address from which ssh connected; empty if unknown.
    """

    hvdtrain: str
    python: str
    interfaces: Interfaces
    reached: str = ""
    origin: str = ""


def report_of(told: Mapping[str, Any]) -> HostReport:
    """Build the report from a host's reply. Ignores unknown fields; raises TypeError if required ones are missing."""
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
    """Explain why a host did not report, and what to do about it, from how ssh to it ended."""
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
    """Return the message about a host that does not report in time, whether or not ssh connected."""
    return (
        f"host {host}: no answer over ssh within {seconds:g} s: it may be overloaded or its network slow; "
        "--start-timeout sets a longer limit"
    )


def differences(host: str, report: HostReport, own: HostReport) -> str:
    """Explain why a host cannot run ranks together with this one. Empty if it can."""
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
    """Explain which hosts have none of the `wanted` interfaces, and what they have instead. Empty if all have one."""
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
    """Return the interface that ssh uses to reach every host, if it has the same name on all hosts; otherwise the only
    interface that all hosts have, with a different address on each. Empty if there is none."""
    names = {_interface_of(report.interfaces, report.reached) for report in others}
    names |= {_interface_of(own.interfaces, report.origin) for report in others}
    if len(names) != 1:
        names = _on_every_host([own.interfaces, *(report.interfaces for report in others)])
    return names.pop() if len(names) == 1 else ""


def loopback_interfaces(own: HostReport) -> set[str]:
    """Return the interfaces with the address 127.0.0.1."""
    return {name for name, has in own.interfaces.items() if "127.0.0.1" in has}


def _on_every_host(hosts: Sequence[Interfaces]) -> set[str]:
    """Return the names of interfaces that all hosts have with different addresses.

    A bridge for containers has the same address on each host.
    """
    common = set.intersection(*(set(interfaces) for interfaces in hosts))
    return {
        name
        for name in common
        if all(interfaces[name] for interfaces in hosts)
        and len({interfaces[name][0] for interfaces in hosts}) == len(hosts)
    }


def _interface_of(interfaces: Interfaces, address: str) -> str:
    return next((name for name, has in interfaces.items() if address in has), "")
