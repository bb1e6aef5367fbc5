"""What /proc tells of processes. Any byte may stand in the names there.

All functions raise OSError for a process that has ended; most also for one of another user.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessState:
    """State of a process in /proc.

    Attributes:
        parent: Process ID of the parent.
        caught: Signals for which the process has handlers.
        stopped: Whether a signal has stopped the process.
    """

    parent: int
    caught: frozenset[int]
    stopped: bool = False


def folder_of(pid: int) -> Path:
    """Return the folder of a process."""
    return Path("/proc") / str(pid)


def all_processes() -> Iterator[int]:
    """Yield the IDs of all processes."""
    yield from (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def parse_status(text: str) -> ProcessState:
    """Parse the text of /proc/PID/status."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    bits = int(fields["SigCgt"], 16)
    return ProcessState(
        int(fields["PPid"]),
        frozenset(number for number in range(1, 65) if bits >> (number - 1) & 1),
        fields["State"].split()[0] == "T",
    )


def state_of(pid: int) -> ProcessState:
    """Read the state of a process."""
    return parse_status((folder_of(pid) / "status").read_text(errors="replace"))


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the program's name, from the state on."""
    return (folder_of(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def environment_of(pid: int) -> dict[str, str]:
    """Return the initial environment of a process."""
    entries = os.fsdecode((folder_of(pid) / "environ").read_bytes()).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def command_of(pid: int) -> list[str]:
    """Return the program and arguments of a process."""
    return os.fsdecode((folder_of(pid) / "cmdline").read_bytes()).split("\0")[:-1]


def descendants_of(pid: int) -> Iterator[int]:
    """Yield the processes that the threads of a process have started, and those that these have started."""
    folder = folder_of(pid) / "task"
    with suppress(OSError):
        for thread in folder.iterdir():
            with suppress(OSError):  # It has ended.
                for child in map(int, (thread / "children").read_text().split()):
                    yield child
                    yield from descendants_of(child)


def name_of(pid: int) -> str:
    """Return the name of a process (comm). Empty if it has ended."""
    try:
        return os.fsdecode((folder_of(pid) / "comm").read_bytes()).rstrip("\n")
    except OSError:
        return ""
