"""Hosts on one machine: each has its own network, host name, process table and sshd.

A host is a process tree in Linux namespaces of its own; the hosts' network cards (eth0) meet in a
bridge that has a namespace too, so nothing is left in the machine's own network, two runs do not
meet, and the end of a host's first process is the end of everything in it. That process waits for
the end of its standard input, which comes when pytest ends in whatever way.

The hosts share the machine's files. From outside, /proc shows the processes of all of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

START_SECONDS = 20
_LISTEN = "0A"
"""The state of a socket in /proc/net/tcp."""
_PROGRAMS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
}
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass(frozen=True)
class NamespaceHost:
    """A running host.

    Attributes:
        name: its host name, which all hosts of the cluster can resolve.
        address: its IPv4 address on eth0.
        pid: its first process, as seen from outside.
        quiet: the processes that it has when nothing runs there.
    """

    name: str
    address: str
    pid: int
    quiet: frozenset[int] = field(default=frozenset(), repr=False)

    def argv(self, command: Sequence[str], folder: Path = Path("/")) -> list[str]:
        """The command that runs `command` on this host in `folder`, started from outside."""
        spaces = ["--net", "--uts", "--mount", "--pid", f"--wdns={folder}"]
        return ["nsenter", f"--target={self.pid}", *spaces, "--", *command]

    def run(self, *command: str, timeout: float = 60, **settings: Any) -> Any:
        """subprocess.run on this host, with its output as text; fails the test if it fails."""
        done = subprocess.run(
            self.argv(command), capture_output=True, text=True, timeout=timeout, **settings
        )
        assert done.returncode == 0, (self.name, command, done.stdout, done.stderr)
        return done

    def processes(self) -> dict[int, str]:
        """Process id (as seen from outside) -> command line, of all that run on this host."""
        space = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            # Processes end while we look; one that has ended has no command line any more.
            with contextlib.suppress(OSError):
                line = (
                    (entry / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
                if line and (entry / "ns/pid").readlink() == space:
                    found[int(entry.name)] = line
        return found

    def listeners(self) -> set[str]:
        """The programs, or Python modules, that listen on every interface of the host, sshd apart."""
        sockets = set()
        for version in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{version}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and not int(words[1].partition(":")[0], 16):
                    sockets.add(f"socket:[{words[9]}]")
        return {
            _program_of(line.split())
            for pid, line in self.processes().items()
            if pid not in self.quiet and sockets & set(_open_files(pid))
        }

    def left(self, seconds: float = 0) -> list[str]:
        """What still runs there beside sshd, after waiting up to `seconds` for it to end."""
        deadline = time.monotonic() + seconds
        while True:
            found = [line for pid, line in self.processes().items() if pid not in self.quiet]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)


def _program_of(words: list[str]) -> str:
    if "-m" in words[1:3]:
        return words[words.index("-m") + 1]
    return Path(words[0]).name


def _open_files(pid: int) -> list[str]:
    """What a process has open: files, and sockets by their number."""
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(link.readlink()))
    return found


def child_of(pid: int, seconds: float = 10) -> int:
    """The only child of a process, once there is one: what `NamespaceHost.argv` has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + seconds
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline, f"process {pid} has no child"
        time.sleep(0.01)
    return int(found[0])


def needed() -> str:
    """What is missing here to make hosts; empty when nothing is."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = {package for name, package in _PROGRAMS.items() if not shutil.which(name, path=_PATH)}
    if missing:
        return f"needs {', '.join(sorted(missing))}: run scripts/cluster_packages.sh"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
    )
    return f"cannot make namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def running_hosts(
    folder: Path,
    names: Sequence[str],
    *,
    unreachable: Sequence[str] = (),
    locked: Sequence[str] = (),
    hidden: Mapping[str, Path] | None = None,
) -> Iterator[dict[str, NamespaceHost]]:
    """Hosts by name, which reach each other as root with `ssh NAME`; skips the test if impossible.

    Args:
        folder: for keys, configuration and logs.
        names: the hosts to start.
        unreachable: names that resolve to an address where nobody is.
        locked: hosts of `names` that accept no key.
        hidden: host -> a folder that looks empty there.
    """
    problem = needed()
    if problem:
        pytest.skip(problem)
    addresses = {name: f"10.77.0.{n}" for n, name in enumerate([*names, *unreachable], start=1)}
    _write_files(folder, addresses)
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_first_process(["--net"], "", {}))
        _in_network(switch, "ip link add br0 type bridge && ip link set br0 up")
        hosts = {}
        for name in names:
            settings = {
                "FOLDER": str(folder),
                "NAME": name,
                "KEYS": "/dev/null" if name in locked else str(folder / "id.pub"),
                "HIDDEN": str((hidden or {}).get(name, "")),
                "PATH": _PATH,
            }
            spaces = ["--net", "--uts", "--mount", "--pid", "--mount-proc"]
            pid = stack.enter_context(_first_process(spaces, _BOOT, settings))
            card = f"v{addresses[name].rpartition('.')[2]}"
            _in_network(switch, f"ip link add {card} type veth peer name eth0 netns {pid}")
            _in_network(switch, f"ip link set {card} master br0 up")
            address = f"ip addr add {addresses[name]}/24 dev eth0"
            _in_network(pid, f"ip link set lo up && {address} && ip link set eth0 up")
            hosts[name] = NamespaceHost(name, addresses[name], pid)
        _wait_for_sshd(hosts, folder)
        yield {
            name: NamespaceHost(name, host.address, host.pid, frozenset(host.processes()))
            for name, host in hosts.items()
        }


# What the first process of a host does. Mounts are the host's own, and end with it.
_BOOT = """
set -e
hostname "$NAME"
mount --bind "$FOLDER/hosts" /etc/hosts
mount --bind "$FOLDER/ssh_config" /etc/ssh/ssh_config
mount -t tmpfs tmpfs /run
mkdir /run/sshd
[ -z "$HIDDEN" ] || mount -t tmpfs tmpfs "$HIDDEN"
"$(command -v sshd)" -f "$FOLDER/sshd_config" -E "$FOLDER/sshd.$NAME.log" -o AuthorizedKeysFile="$KEYS"
"""


@contextlib.contextmanager
def _first_process(spaces: Sequence[str], boot: str, settings: Mapping[str, str]) -> Iterator[int]:
    """Start a shell in new namespaces that runs `boot` and then waits; yields its process id."""
    process = subprocess.Popen(
        ["unshare", *spaces, "--fork", "--kill-child", "sh", "-c", f"{boot}\nexec cat"],
        env={**os.environ, **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    try:
        yield child_of(process.pid)
    finally:
        process.stdin.close()
        try:
            process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _in_network(pid: int, script: str) -> None:
    command = ["nsenter", f"--target={pid}", "--net", "sh", "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PATH": _PATH}
    )
    assert done.returncode == 0, (script, done.stderr)


def _write_files(folder: Path, addresses: Mapping[str, str]) -> None:
    for name in ("host_key", "id"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    lines = [f"{address} {name}" for name, address in addresses.items()]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
    (folder / "ssh_config").write_text(
        # What stands first counts: tests put what a user may have in a file of its own.
        f"Include {folder}/users_config\nHost *\n  User root\n  IdentityFile {folder}/id\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nPidFile none\nUsePAM no\nStrictModes no\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\n"
        "MaxStartups 100\n"
    )


def _wait_for_sshd(hosts: Mapping[str, NamespaceHost], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    for host in hosts.values():
        probe = f"exec 3<>/dev/tcp/{host.address}/22"
        while subprocess.run(host.argv(["bash", "-c", probe]), capture_output=True).returncode:
            log = folder / f"sshd.{host.name}.log"
            said = log.read_text() if log.exists() else "it wrote no log"
            assert time.monotonic() < deadline, f"sshd of {host.name} does not answer: {said}"
            time.sleep(0.05)
