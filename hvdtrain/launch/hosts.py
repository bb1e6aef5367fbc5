"""Parse hosts and their slots: `-H a:2,b:4` and hostfiles.

Both are passed to horovodrun as `-H`: its own hostfile parser fails on comments, blank lines and
`max_slots`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.user_files import read_text

MOST_SLOTS = 1_000_000
"""Upper limit of slots. A larger number is a typing error, and would exhaust the memory before the start."""
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_HOST = re.compile(r"(?P<name>[^:\s]+):(?P<slots>\d{1,99})", re.ASCII)
_LINE = re.compile(
    r"(?P<name>\S+)\s+slots\s*=\s*(?P<slots>\d{1,99})(\s+max[_-]slots\s*=\s*\d+)?", re.ASCII
)


@dataclass(frozen=True)
class Host:
    """A host and its number of slots.

    Attributes:
        name: Host name or IPv4 address.
        slots: Maximum number of ranks on the host, from 1 to MOST_SLOTS.

    Raises:
        UsageError: The name or the number of slots is invalid.
    """

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
    """Return whether `text` is a valid host name for Horovod, ssh and a shell."""
    return bool(_NAME.fullmatch(text)) and not text.startswith("-")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse `name:slots,name:slots,...`. Raises UsageError if an item is invalid or a host is named twice."""
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
    """Read a hostfile: lines `name slots=N`, blank lines and `# comments`.

    Raises:
        UsageError: The file cannot be read, names no hosts, or has an invalid line.
    """
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
    """Return the hosts of --hosts or --hostfile, or () if neither is given. Raises UsageError if both are given."""
    if hosts and hostfile is not None:
        raise UsageError("--hosts and --hostfile both name the hosts: use only one of them")
    return read_hostfile(hostfile) if hostfile is not None else hosts or ()


def _distinct(hosts: list[Host]) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"host {name} is named twice: name it once, with all its slots")
    return tuple(hosts)
