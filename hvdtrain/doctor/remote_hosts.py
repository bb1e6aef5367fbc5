"""Check each of the other hosts: its name, ssh, versions, the network to it, its clock."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.doctor import host_probe
from hvdtrain.doctor.checks import Check, Options, Result, fail, marked_answer, ok, warn
from hvdtrain.doctor.software import minor
from hvdtrain.launch.addresses import is_this_machine
from hvdtrain.launch.running.timed_command import CompletedCommand, run
from hvdtrain.launch.ssh import (
    BATCH,
    SSH_FAILED,
    explain_ssh,
    is_unknown_key,
    path_variables,
    unseen_keys,
)
from hvdtrain.launch.ssh import where as reach

CLOCK_SECONDS = 5.0
"""Maximum clock difference. Beyond it, times in logs mislead, and services with signed times (munge, Kerberos) fail."""

NO_COMMAND = (126, 127)
"""Exit codes of a shell that cannot run the command."""

_FORGET = ("-o", "UserKnownHostsFile=/dev/null")


def checks(options: Options) -> list[Check]:
    """Return one check per host, which makes one or two ssh connections."""
    limit = 2 * options.quick

    def check(host: str) -> Check:
        return Check(f"Host {host}", host, lambda: check_host(host, options, limit), limit)

    return [check(host) for host in options.hosts]


def is_here(host: str) -> bool:
    """Return whether a name refers to this machine, whose own name may have no address."""
    return host in ("localhost", socket.gethostname()) or is_this_machine(host)


def check_host(host: str, options: Options, limit: float) -> Sequence[Result]:
    """Return all results of one host, up to the first failure, as later checks depend on earlier ones."""
    name = check_name(host, socket.gethostbyname)
    if name.status == "fail":
        return [name]
    found = host_probe.interfaces()
    if is_here(host):
        missing = _missing(options.interfaces, found, "this machine")
        return [name, missing or ok("ssh", "not needed: this machine")]
    folder = str(Path.cwd())
    ours = wanted_interfaces(found, options.interfaces)
    with listening(list(ours.values())) as addresses:
        question = json.dumps({"addresses": addresses, "folder": folder})
        said = ask(host, question, options, limit)
        accepting = accepts_unseen(host, options, said)
        if accepting:
            said = ask(host, question, options, limit, (*accepting, *_FORGET))
        finished = time.time()
    login = check_ssh(host, options, said, limit)
    if login.status == "fail":
        return [name, login]
    assert said is not None and said.returncode not in (None, SSH_FAILED)
    if accepting:
        login = unknown_key(host, options)
    answer = answer_of(said)
    if isinstance(answer, Result):
        return [name, login, answer]
    own = host_probe.report({"addresses": [], "folder": folder})
    return [
        name,
        login,
        check_versions(answer, own),
        check_folder(answer, folder),
        check_network(answer, found, options.interfaces),
        check_clock(answer["time"], said.started, finished),
    ]


def ask(
    host: str, question: str, options: Options, limit: float, more: Sequence[str] = ()
) -> CompletedCommand | None:
    """Run host_probe on the host. ssh times out earlier than this call, and reports the reason."""
    argv = ["ssh", *BATCH, "-o", f"ConnectTimeout={max(1, round(limit / 2))}"]
    where = reach(options.ssh_port, options.ssh_identity_file)
    # A variable instead of -P, so that an old Python runs and can report its version.
    settings = [f"{name}={value}" for name, value in path_variables(options.environ).items()]
    settings += ["PYTHONSAFEPATH=1"]
    return run(
        [*argv, *where, *more, host, shlex.join(["env", *settings, sys.executable, "-", question])],
        limit=limit,
        environ=options.environ,
        stdin=Path(host_probe.__file__).read_text(),
    )


def check_ssh(host: str, options: Options, said: CompletedCommand | None, limit: float) -> Result:
    """Check that ssh could log in. A failed remote command is not a failure of ssh."""
    if said is None:
        return fail("ssh", "no ssh in PATH", "install openssh-client")
    if said.returncode is None:
        fix = f"log in by hand: ssh {host}; a slow login (home folder, name service) delays every launch"
        return fail("ssh", f"took longer than {limit:g} s", fix)
    if said.returncode != SSH_FAILED:
        return ok("ssh", f"logs in without a prompt ({said.seconds:.1f} s)")
    error = explain_ssh(host, said.stderr, options.ssh_port, options.ssh_identity_file)
    return fail("ssh", error.cause, error.fix)


def accepts_unseen(host: str, options: Options, said: CompletedCommand | None) -> tuple[str, ...]:
    """Return the ssh options with which a launch accepts an unknown host key, if ssh refused the host for that reason.

    Empty otherwise, or if the user's ssh configuration refuses such keys.
    """
    if said is None or said.returncode != SSH_FAILED or not is_unknown_key(said.stderr):
        return ()
    return unseen_keys(host, options.ssh_port, options.ssh_identity_file, options.environ)


def unknown_key(host: str, options: Options) -> Result:
    """Return a warning: a launch would accept and remember the key, which could be an attacker's."""
    port = f" -p {options.ssh_port}" if options.ssh_port is not None else ""
    fix = f"compare it, and log in once by hand: ssh{port} {host}"
    return warn("ssh", "its host key is unknown here, and a launch would accept it unchecked", fix)


def check_name(host: str, resolve: Callable[[str], str]) -> Result:
    """Check that the name has an address."""
    try:
        address = resolve(host)
    except (OSError, UnicodeError):  # UnicodeError for empty or too long labels.
        fix = "correct it, add it to DNS or /etc/hosts, or use its address"
        return fail("name", f"the name {host} cannot be resolved here", fix)
    return ok("name", address if address != host else "an address")


def answer_of(said: CompletedCommand) -> dict[str, Any] | Result:
    """Return the output of host_probe, or a failure if the host's Python did not run it."""
    answer = marked_answer(said, host_probe.MARKER)
    if answer is not None:
        return answer
    if said.returncode in NO_COMMAND:
        fix = "create the same environment there, at the same path (or on a shared file system)"
        return fail("Python", f"there is no {sys.executable} on this host", fix)
    fix = "the login shell there must not print or ask anything, and its Python must work"
    return fail("Python", said.last_line, fix)


def check_versions(answer: Mapping[str, Any], own: Mapping[str, Any]) -> Result:
    """Check for the same versions of TensorFlow, Keras, Horovod and hvdtrain, and the same minor version of Python."""
    theirs = {"Python": answer["python"], **answer["versions"]}
    ours = {"Python": own["python"], **own["versions"]}
    other = [
        f"{name} {theirs[name] or 'missing'} (here {ours[name] or 'none'})"
        for name in ours
        if theirs[name] != ours[name]
        and not (name == "Python" and minor(theirs[name]) == minor(ours[name]))
    ]
    if other:
        fix = "set up the same environment there, at the same path"
        return fail("versions", ", ".join(other), fix)
    if answer["package"] != own["package"]:
        seen = f"hvdtrain is in {answer['package']} there, in {own['package']} here"
        return fail("versions", seen, "install it at the same path on all hosts")
    names = [f"{name} {version}" for name, version in ours.items() if version]
    return ok("versions", "as here: " + ", ".join(names))


def check_folder(answer: Mapping[str, Any], folder: str) -> Result:
    """Check that the current folder also exists on the host."""
    if answer["folder"]:
        return ok("folder", f"{folder} exists there")
    fix = "start from a folder that all hosts share, or copy the script and its data there"
    return warn(
        "folder",
        f"{folder} does not exist there: workers look for the script and its data in it",
        fix,
    )


def wanted_interfaces(found: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Return the addresses of the interfaces to try: the named ones, else all except loopback."""
    return {
        name: address
        for name, address in found.items()
        if (name in named if named else not address.startswith("127."))
    }


def check_network(
    answer: Mapping[str, Any], found: Mapping[str, str], named: Sequence[str]
) -> Result:
    """Check that both sides have a requested interface, and that the host can connect to this machine, like ranks."""
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
            "this machine has only a loopback address",
            "ip address; ip link set ... up",
        )
    reached = {name: address for name, address in ours.items() if address in answer["reached"]}
    closed = [f"{name} {address}" for name, address in ours.items() if name not in reached]
    if not reached:
        return fail("network", f"it cannot connect to this machine's {', '.join(closed)}", open_fix)
    seen = ", ".join(f"{name} {address}" for name, address in reached.items())
    return ok("network", f"it connects to this machine's {seen}")


def check_clock(theirs: float, started: float, finished: float) -> Result:
    """Check that the host's clock, read between `started` and `finished` of ours, agrees with it."""
    apart = max(started - theirs, theirs - finished, 0.0)
    if apart <= CLOCK_SECONDS:
        return ok("clock", f"within {finished - started + apart:.1f} s of this machine's")
    way = "behind" if theirs < started else "ahead"
    fix = "synchronize both clocks: timedatectl set-ntp true"
    return fail("clock", f"{apart:.0f} s {way}", fix)


@contextmanager
def listening(addresses: Sequence[str]) -> Iterator[list[tuple[str, int]]]:
    """Listen on a free port of each address. The kernel accepts connections by itself."""
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


def _missing(named: Sequence[str], found: Mapping[str, str], where: str) -> Result | None:
    if not named or any(name in found for name in named):
        return None
    seen = (
        f"{where} has no interface {' or '.join(named)} with an address; it has {', '.join(found)}"
    )
    return fail("network", seen, "name one that all hosts have: --network-interfaces")
