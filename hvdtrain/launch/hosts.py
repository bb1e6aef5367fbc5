"""Hosts and their slots: `-H a:2,b:4` and hostfiles.

Both become one clean list here, and horovodrun gets it as `-H`: its own hostfile reader fails on
comments, blank lines and `max_slots`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.user_files import read_text

MOST_SLOTS = 1_000_000
"""More is a typing error, which would fill the memory before anything is started."""
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_HOST = re.compile(r"(?P<name>[^:\s]+):(?P<slots>\d{1,99})", re.ASCII)
_LINE = re.compile(
    r"(?P<name>\S+)\s+slots\s*=\s*(?P<slots>\d{1,99})(\s+max[_-]slots\s*=\s*\d+)?", re.ASCII
)


@dataclass(frozen=True)
class Host:
    """A host name or IPv4 address and the number of ranks that it takes, from 1 to MOST_SLOTS."""

    name: str
    slots: int

    def __post_init__(self) -> None:
        if not is_host_name(self.name):
            raise UsageError(
                f"{self.name!r} is not a host name: use letters, digits, '.', '_' and '-' "
                "(Horovod does not support IPv6 addresses: give the host a name)"
            )
        if self.slots < 1:
            raise UsageError(
                f"host {self.name} has {self.slots} slots: it needs at least 1, or leave it out"
            )
        if self.slots > MOST_SLOTS:
            raise UsageError(f"host {self.name} has {self.slots} slots: at most {MOST_SLOTS}")

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def is_host_name(text: str) -> bool:
    """Whether `text` is a valid host name for Horovod, ssh and a shell."""
    return bool(_NAME.fullmatch(text)) and not text.startswith("-")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `name:slots,name:slots,...`. Raises UsageError."""
    hosts = []
    for item in text.split(","):
        match = _HOST.fullmatch(item.strip())
        if match is None:
            raise UsageError(
                f"cannot read {item.strip()!r} in the host list {text!r}: expected name:slots, "
                "separated by commas, such as node1:4,node2:4"
            )
        hosts.append(Host(match["name"], int(match["slots"])))
    return _distinct(hosts)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file: lines `name slots=N`, blank ones, `# comments`. Raises UsageError."""
    lines = read_text(path, "hostfile").splitlines()
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        try:
            if match is None:
                raise UsageError(
                    f"cannot read {content!r}: expected name slots=N, such as node1 slots=4"
                )
            hosts = list(_distinct([*hosts, Host(match["name"], int(match["slots"]))]))
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
    if not hosts:
        raise UsageError(
            f"the hostfile {path} names no hosts: expected name slots=N, one host per line"
        )
    return tuple(hosts)


def hosts_of(hosts: tuple[Host, ...] | None, hostfile: Path | None) -> tuple[Host, ...]:
    """The hosts of --hosts or --hostfile; none if neither is given. Raises UsageError if both are."""
    if hosts and hostfile is not None:
        raise UsageError("--hosts and --hostfile both name the hosts: use only one of them")
    return read_hostfile(hostfile) if hostfile is not None else hosts or ()


def _distinct(hosts: list[Host]) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"host {name} is named twice: name it once, with all its slots")
    return tuple(hosts)
