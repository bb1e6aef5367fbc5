"""One other host: its name, ssh, the same versions, the network between us, its clock."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.doctor import host_report
from hvdtrain.doctor.finding import Finding, fail, ok, warn
from hvdtrain.doctor.ssh import FAILED, Ssh, has_unknown_key, ssh_finding, unknown_key_finding
from hvdtrain.launch.running.bounded import Ran

CLOCK_SECONDS = 5.0
"""Further apart, the times in logs and files mislead, and services that sign with the time (munge, Kerberos) refuse."""

NO_COMMAND = (126, 127)
"""What a shell exits with if it cannot run the command."""


@dataclass(frozen=True)
class Request:
    """How hosts are to be looked at.

    Attributes:
        ssh: how to reach them.
        interfaces: network interfaces of which one must be on each side, and connect; empty: any.
        environ: of the commands.
        limit: seconds for the ssh.
    """

    ssh: Ssh
    interfaces: tuple[str, ...]
    environ: Mapping[str, str]
    limit: float


def is_here(host: str) -> bool:
    """Whether a name means this machine: only an own address can be bound. False for a name that is unknown."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((host, 0))
    except OSError:
        return False
    return True


def look_at_host(host: str, request: Request) -> Sequence[Finding]:
    """All findings of one host; the first that is red ends the list, for nothing behind it can be known."""
    name = name_finding(host, socket.gethostbyname)
    if name.status == "fail":
        return [name]
    if is_here(host):
        return [name, *_own_findings(request.interfaces)]
    found = host_report.interfaces()
    ours = wanted_interfaces(found, request.interfaces)
    with listening(list(ours.values())) as addresses:
        question = json.dumps({"addresses": addresses, "folder": str(Path.cwd())})

        def ask(unseen: bool) -> Ran | None:
            return request.ssh.run(
                host,
                [sys.executable, "-", question],
                limit=request.limit,
                environ=request.environ,
                stdin=Path(host_report.__file__).read_text(),
                unseen=unseen,
            )

        said = ask(unseen=False)
        unknown_key = has_unknown_key(said)
        if unknown_key:
            said = ask(unseen=True)
        finished = time.time()
    login = ssh_finding(host, request.ssh, said, request.limit)
    if login.status == "fail":
        return [name, login]
    assert said is not None and said.returncode not in (None, FAILED)
    if unknown_key:
        login = unknown_key_finding(host, request.ssh)
    answer = answer_of(said)
    if isinstance(answer, Finding):
        return [name, login, answer]
    own = host_report.report({"addresses": [], "folder": str(Path.cwd())})
    return [
        name,
        login,
        versions_finding(answer, own),
        folder_finding(answer),
        network_finding(answer, found, request.interfaces),
        clock_finding(answer["time"], said.started, finished),
    ]


def name_finding(host: str, resolve: Callable[[str], str]) -> Finding:
    try:
        address = resolve(host)
    except OSError:
        fix = "correct it, or add it to DNS or /etc/hosts, or give its address"
        return fail("name", f"{host} is not known here", fix)
    return ok("name", address if address != host else "an address")


def answer_of(said: Ran) -> dict[str, Any] | Finding:
    """What host_report printed there; a red line if Python did not run it."""
    lines = [line for line in said.stdout.splitlines() if line.startswith(host_report.MARKER)]
    if lines:
        answer: dict[str, Any] = json.loads(lines[-1].removeprefix(host_report.MARKER))
        return answer
    if said.returncode in NO_COMMAND:
        fix = "make the same environment there, at the same path (or on a file system that all hosts share)"
        return fail("Python", f"there is no {sys.executable}", fix)
    fix = "the login shell there must not write or ask anything, and its Python must work"
    return fail("Python", said.last_line or f"ended with exit code {said.returncode}", fix)


def versions_finding(answer: Mapping[str, Any], own: Mapping[str, Any]) -> Finding:
    """Python, TensorFlow, Keras, Horovod and hvdtrain must be the same, and hvdtrain at the same place."""
    theirs = {"Python": answer["python"], **answer["versions"]}
    ours = {"Python": own["python"], **own["versions"]}
    other = [
        f"{name} {theirs[name] or 'missing'} (here {ours[name] or 'none'})"
        for name in ours
        if theirs[name] != ours[name]
    ]
    if other:
        fix = "set up the same environment there, at the same path"
        return fail("versions", ", ".join(other), fix)
    if answer["package"] != own["package"]:
        seen = f"hvdtrain lies in {answer['package']} there, in {own['package']} here"
        return fail("versions", seen, "install it at the same path on all hosts")
    names = [f"{name} {version}" for name, version in ours.items() if version]
    return ok("versions", "as here: " + ", ".join(names))


def folder_finding(answer: Mapping[str, Any]) -> Finding:
    folder = Path.cwd()
    if answer["folder"]:
        return ok("folder", f"{folder} is there too")
    fix = "start from a folder that all hosts share, or copy the script and its data there"
    return warn("folder", f"{folder} is not there: scripts and data are looked for in it", fix)


def wanted_interfaces(found: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Name -> address of the interfaces to try: the named ones, else all but the loopback."""
    return {
        name: address
        for name, address in found.items()
        if (name in named if named else not address.startswith("127."))
    }


def network_finding(
    answer: Mapping[str, Any], found: Mapping[str, str], named: Sequence[str]
) -> Finding:
    """One of the named interfaces is on each side, and the host can connect to this machine, as its ranks will."""
    missing = _missing(named, found, "this machine") or _missing(
        named, answer["interfaces"], answer["host"]
    )
    if missing:
        return missing
    open_fix = (
        "open the firewall between the hosts (all TCP ports from 1024), or name the network that they share: "
        "--network-interfaces"
    )
    ours = wanted_interfaces(found, named)
    if not ours:
        return fail(
            "network",
            "this machine has no address but the loopback's",
            "ip address; ip link set ... up",
        )
    reached = {name: address for name, address in ours.items() if address in answer["reached"]}
    closed = [f"{name} {address}" for name, address in ours.items() if name not in reached]
    if not reached:
        return fail("network", f"it cannot connect to this machine's {', '.join(closed)}", open_fix)
    seen = ", ".join(f"{name} {address}" for name, address in reached.items())
    return ok("network", f"it connects to this machine's {seen}")


def clock_finding(theirs: float, started: float, finished: float) -> Finding:
    """Their clock was read between `started` and `finished` of ours."""
    apart = max(started - theirs, theirs - finished, 0.0)
    if apart <= CLOCK_SECONDS:
        return ok("clock", f"as ours, within {finished - started + apart:.1f} s")
    way = "behind" if theirs < started else "ahead"
    fix = "let both keep time from the network: timedatectl set-ntp true"
    return fail("clock", f"{apart:.0f} s {way}", fix)


@contextmanager
def listening(addresses: Sequence[str]) -> Iterator[list[tuple[str, int]]]:
    """Listen on each address, on a free port; the kernel accepts connections by itself."""
    sockets = []
    try:
        for address in addresses:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.bind((address, 0))
            sock.listen(64)
        yield [sock.getsockname() for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def _own_findings(named: Sequence[str]) -> list[Finding]:
    missing = _missing(named, host_report.interfaces(), "this machine")
    return [missing or ok("ssh", "not needed: this machine")]


def _missing(named: Sequence[str], found: Mapping[str, str], where: str) -> Finding | None:
    if not named or any(name in found for name in named):
        return None
    seen = (
        f"{where} has no interface {' or '.join(named)} with an address; it has {', '.join(found)}"
    )
    return fail("network", seen, "name one that all hosts have: --network-interfaces")
