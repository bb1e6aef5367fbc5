"""Detect stopped programs between `hvdtrain run` and its ranks. Nothing else watches them, and a run cannot end
without them. On this host, these are all programs that the launch command has started; on others, Open MPI's daemon
or the shell of each rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.rank_variables import is_rank
from hvdtrain.tf_config import TF_CONFIG
from hvdtrain.worker.proc_files import command_of, environment_of, folder_of, stat_of

LOOK_SECONDS = 2.0
PAUSE_SECONDS = 5.0
"""A longer interval between two looks means that this process was itself stopped, and perhaps the others too."""


@dataclass(frozen=True)
class StoppedProgram:
    """A stopped program.

    Attributes:
        name: Name of its file, or of the module that Python runs.
        pid: Process ID on its host.
        held: Seconds since it was first seen stopped.
        host: Name of the host as given by the user; empty for the launcher's own.
    """

    name: str
    pid: int
    held: float
    host: str = ""

    def __str__(self) -> str:
        place = f" on host {self.host}" if self.host else ""
        return (
            f"{self.name}{place} (process {self.pid}), which the run waits for, is stopped (SIGSTOP): by a "
            "debugger, Ctrl-Z or `kill -STOP`?"
        )


@dataclass
class StoppedPrograms:
    """Watches programs, and the processes that they have started on this host, down to the ranks."""

    _since: dict[int, float] = field(default_factory=dict)
    _looked: float = float("-inf")
    _elsewhere: dict[str, list[StoppedProgram]] = field(default_factory=dict)

    def look(self, programs: Iterable[int]) -> list[StoppedProgram]:
        """Return the stopped programs on all hosts; on this one, those of these process IDs. Call regularly."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            if now - self._looked > PAUSE_SECONDS:
                self._since.clear()
            self._looked = now
            stopped = {pid for top in programs for pid in _stopped(top)}
            self._since = {pid: self._since.get(pid, now) for pid in stopped}
        here = (
            StoppedProgram(name, pid, self._looked - since)
            for pid, since in self._since.items()
            if (name := _name(pid))
        )
        return [*here, *(one for some in self._elsewhere.values() for one in some)]

    def hear(self, host: str, stopped: Iterable[Mapping[str, Any]]) -> None:
        """Record what is now stopped on another host, as dictionaries of `StoppedProgram`."""
        self._elsewhere[host] = [StoppedProgram(**{**one, "host": host}) for one in stopped]


def _name(pid: int) -> str:
    """Return the name of a program's file, or of the module that Python runs. Empty if it has ended."""
    with suppress(OSError):
        words = command_of(pid)
        name = Path(words[0]).name if words else ""
        if name.startswith("python") and "-m" in words[:-1]:
            return words[words.index("-m") + 1]
        return name
    return ""


def _stopped(pid: int) -> Iterator[int]:
    """Yield which of a process and its descendants are stopped, excluding ranks and their descendants."""
    with suppress(OSError):
        environ = environment_of(pid)
        if is_rank(environ) or TF_CONFIG in environ:
            return
        if stat_of(pid)[0] == "T":
            yield pid
        for thread in (folder_of(pid) / "task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _stopped(int(child))
