"""Observe the ranks on this host from outside: their processes in /proc and their heartbeats.

Every process of a launch has the launch ID in its environment. Ranks, and the processes they start, also have the
rank's number there.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from hvdtrain.environment import LAUNCH_ID
from hvdtrain.launch.running.processes import processes_of
from hvdtrain.rank_variables import is_elastic, is_rank, local_size_of, rank_of, size_of, slot_of
from hvdtrain.worker.heartbeat import Heartbeat, Page, has_page_of, page_of
from hvdtrain.worker.output_frames import HELPER
from hvdtrain.worker.proc_files import (
    ProcessState,
    all_processes,
    descendants_of,
    environment_of,
    folder_of,
    name_of,
    stat_of,
    state_of,
)

State = Literal["running", "stopped", "uninterruptible", "traced", "gone"]
_STATES: dict[str, State] = {
    "T": "stopped",
    "t": "traced",
    "D": "uninterruptible",
    "Z": "gone",
    "X": "gone",
}
FIRST_SEARCHES_SECONDS = 1.0
LAST_SEARCHES_SECONDS = 10.0
"""Bounds of the interval between searches of all processes while ranks of this host are missing; it grows over time."""
BUSY_TICKS = 5
"""Clock ticks (usually 10 ms each) of CPU time that count as work; occasional wake-ups take fewer."""
_NO_PROGRAM = "0"
"""Stack address reported for a process that has ended or may not be inspected."""
_MPI_DAEMONS = {"orted", "prted"}
MPI_PARAMETER = "hvdtrain_launch_id"
"""Parameter set for Open MPI, which ignores it, to mark its processes with the launch ID."""
_PAUSE_SECONDS = 5.0
"""A longer interval between two looks means that this process was itself stopped, and perhaps the ranks with it."""


def topmost(parents: Mapping[int, int]) -> set[int]:
    """Return the process IDs whose parent is not among the keys of `parents` (process ID -> parent's ID)."""
    return {pid for pid, parent in parents.items() if parent not in parents}


@dataclass(frozen=True)
class RankProcess:
    """A rank, or a process that a rank has started."""

    environ: Mapping[str, str]
    state: ProcessState


def rank_processes(launch_id: str) -> dict[int, RankProcess]:
    """Return the ranks of the launch on this host, and the processes they have started, by process ID."""
    found = {}
    for pid in processes_of(launch_id):
        with suppress(OSError, ValueError):
            environ = environment_of(pid)
            # Scripts of one process, or with parameter servers, have no rank number.
            numbered = is_rank(environ) or has_page_of(pid, launch_id)
            if numbered and name_of(pid) != HELPER:
                found[pid] = RankProcess(environ, state_of(pid))
    return found


def mpi_daemons_of(launch_id: str) -> set[int]:
    """Return the IDs of Open MPI's processes that run the launch's ranks on this host.

    The launch ID is a parameter in the command line of each, and of the shell that starts it. Daemons of Open MPI 5,
    which have other parameters, are recognized as parents of ranks.
    """
    parents = (one.state.parent for one in rank_processes(launch_id).values())
    found = {pid for pid in parents if name_of(pid) in _MPI_DAEMONS}
    return found | _saying(rb'%s[\0 "]+%s\b' % (MPI_PARAMETER.encode(), launch_id.encode()))


def rank_shells_of(launch_id: str) -> set[int]:
    """Return the IDs of the shells that wait for ranks of a launch over Gloo, on a host other than the launcher's.

    The launch ID is a variable in the command line of each.
    """
    return _saying(rb"\b%s=%s\b" % (LAUNCH_ID.encode(), launch_id.encode()))


def _saying(pattern: bytes) -> set[int]:
    """Return the IDs of the processes whose command line matches `pattern`."""
    found = set()
    for pid in all_processes():
        with suppress(OSError):
            if re.search(pattern, (folder_of(pid) / "cmdline").read_bytes()):
                found.add(pid)
    return found


@dataclass(frozen=True)
class RankStatus:
    """State of one rank at one moment.

    Attributes:
        rank: Number of the rank; in an elastic job, its current one.
        pid: Process ID on its host.
        state: State of the process.
        held: Seconds in that state.
        idle: Seconds since its heartbeat made progress.
        heartbeat: Last heartbeat; None for a program that is not a Python script.
        host: Name of the host as given by the user; empty for the launcher's own.
        quiet: Seconds since the process used the CPU; before init, it or one below it.
        ending: Whether the script is running its handler for a signal that ends the run.
        size: Number of ranks in the job, as set by the launcher.
        slot: Position among the ranks of the host in an elastic job, where rank numbers change; otherwise empty.
    """

    rank: int
    pid: int
    state: State
    held: float
    idle: float
    heartbeat: Heartbeat | None
    host: str = ""
    quiet: float = 0.0
    ending: bool = False
    size: int = 1
    slot: str = ""

    @property
    def phase(self) -> str:
        """Phase of the heartbeat (see `heartbeat.Phase`); empty if unknown."""
        return self.heartbeat.phase if self.heartbeat else ""

    @property
    def has_ended(self) -> bool:
        """Whether the script has run to its end."""
        return self.phase == "ended"


def as_json(statuses: Iterable[RankStatus]) -> list[dict[str, Any]]:
    """Convert the ranks to dictionaries for JSON, as read by `from_json`."""
    return [asdict(status) for status in statuses]


def from_json(statuses: Iterable[dict[str, Any]], host: str | None = None) -> list[RankStatus]:
    """Convert the result of `as_json` back, for ranks of `host` if it is given. Raises TypeError for invalid fields."""
    found = [_status(**fields) for fields in statuses]
    return found if host is None else [replace(one, host=host) for one in found]


def _status(heartbeat: dict[str, Any] | None, **fields: Any) -> RankStatus:
    return RankStatus(heartbeat=Heartbeat(**heartbeat) if heartbeat else None, **fields)


@dataclass
class _Seen:
    """A rank of this host: its process, its heartbeat page, and its last known state.

    Attributes:
        born: Start time of the process, which tells it from another one with the same ID.
        program: Identity of the program; changes when the process executes another one, which has no heartbeat page.
    """

    pid: int
    born: str
    program: str
    page: Page | None
    status: RankStatus
    state_since: float
    ticks: int = 0
    ticks_below: int = 0
    busy_at: float = 0.0

    @property
    def is_there(self) -> bool:
        return self.status.state != "gone"

    def gives_way_to(self, page: Page | None) -> bool:
        """Return whether a process with this page is the actual rank; leftovers of one have no page, or its old one."""
        if page is None:
            return False
        return self.page is None or (not self.is_there and page.inode != self.page.inode)


@dataclass
class RankMonitor:
    """Monitors the ranks of a launch on this host. Call `look` about once a second."""

    launch_id: str
    _seen: dict[tuple[str, int], _Seen] = field(default_factory=dict)
    _expected: float = 1
    _search_at: float = float("-inf")
    _interval: float = FIRST_SEARCHES_SECONDS
    _looked: float = float("inf")
    _resumed: float = float("-inf")

    def look(self, *, search: bool = False) -> list[RankStatus]:
        """Return the ranks found so far, in the order of their slots, including those that have ended.

        Args:
            search: Whether to search for missing ranks now, even if no search is due.
        """
        now = time.monotonic()
        if now - self._looked > _PAUSE_SECONDS:
            self._resumed = now
            for seen in self._seen.values():
                seen.state_since = seen.busy_at = now
        self._looked = now
        whole = sum(seen.page is not None and seen.is_there for seen in self._seen.values())
        if whole < self._expected and (search or now >= self._search_at):
            self._search(now)
            self._search_at = now + self._interval
            self._interval = min(1.2 * self._interval, LAST_SEARCHES_SECONDS)
        for seen in self._seen.values():
            self._update(seen, now)
        return [self._seen[slot].status for slot in sorted(self._seen)]

    def processes(self) -> Iterator[tuple[int, int]]:
        """Yield (rank, process ID) for each running rank."""
        for seen in self._seen.values():
            if seen.is_there:
                yield seen.status.rank, seen.pid

    def left_behind(self) -> dict[int, str]:
        """Return the processes that scripts started and that outlived all ranks of this host, as process ID -> name."""
        if any(seen.is_there for seen in self._seen.values()):
            return {}
        found = {}
        for pid, process in rank_processes(self.launch_id).items():
            # A process not adopted by init may be a rank that has not been seen yet.
            adopted = process.state.parent == 1
            if is_elastic(process.environ) or not (
                adopted or slot_of(process.environ) in self._seen
            ):
                continue
            if name := name_of(pid):
                found[pid] = name
        return found

    def _search(self, now: float) -> None:
        """Find each rank's process: the topmost one with a heartbeat page, perhaps below processes of the launcher."""
        found = rank_processes(self.launch_id)
        pages = {pid: page for pid in found if (page := page_of(pid)) is not None}
        for one in (found.keys() - pages.keys(), pages.keys()):
            for pid in topmost({pid: found[pid].state.parent for pid in one}):
                # Leftovers of a rank are adopted by init.
                if pid in pages or found[pid].state.parent != 1:
                    self._take(pid, found[pid].environ, pages.get(pid), now)

    def _take(self, pid: int, environ: Mapping[str, str], page: Page | None, now: float) -> None:
        rank = rank_of(environ)
        before = self._seen.get(slot_of(environ))
        if before is not None and not before.gives_way_to(page):
            return
        with suppress(OSError):
            _, born, program, _ = _fields_of(pid)
            # In an elastic job, more ranks may join.
            self._expected = math.inf if is_elastic(environ) else max(1, local_size_of(environ))
            size = size_of(environ)
            slot = ":".join(map(str, slot_of(environ))) if is_elastic(environ) else ""
            status = RankStatus(rank, pid, "running", 0.0, 0.0, None, size=size, slot=slot)
            self._seen[slot_of(environ)] = _Seen(pid, born, program, page, status, now, busy_at=now)
            self._interval = FIRST_SEARCHES_SECONDS

    def _update(self, seen: _Seen, now: float) -> None:
        if seen.status.state == "gone":
            seen.status = replace(seen.status, held=now - seen.state_since)
            return
        try:
            letter, born, program, ticks = _fields_of(seen.pid)
        except OSError:
            letter, born, program, ticks = "X", seen.born, seen.program, seen.ticks
        heartbeat = seen.status.heartbeat
        if born == seen.born and program not in (seen.program, _NO_PROGRAM):
            seen.program, seen.page, heartbeat = program, None, None
        if ticks - seen.ticks >= BUSY_TICKS:
            seen.ticks, seen.busy_at = ticks, now
        if seen.status.phase == "starting":  # It may wait for a program that it has started.
            found = sum(map(_ticks_of, descendants_of(seen.pid)))
            seen.busy_at = now if found - seen.ticks_below >= BUSY_TICKS else seen.busy_at
            seen.ticks_below = found
        state = _STATES.get(letter, "running") if born == seen.born else "gone"
        if state != seen.status.state:
            seen.state_since = now
        if seen.page is not None:
            with suppress(ValueError):
                heartbeat = seen.page.read()
        since = max(heartbeat.since if heartbeat else 0.0, self._resumed)
        idle = now - since if heartbeat else 0.0
        seen.status = replace(
            seen.status,
            rank=heartbeat.rank if heartbeat and heartbeat.rank >= 0 else seen.status.rank,
            state=state,
            held=now - seen.state_since,
            idle=idle,
            heartbeat=heartbeat,
            quiet=now - seen.busy_at,
        )


def _fields_of(pid: int) -> tuple[str, str, str, int]:
    """Return the state, start time, stack bottom and clock ticks of CPU time from /proc/PID/stat.

    The stack address is randomized, so it changes after execve.
    """
    state, *rest = stat_of(pid)
    return state, rest[18], rest[24], int(rest[10]) + int(rest[11])


def _ticks_of(pid: int) -> int:
    try:
        return _fields_of(pid)[-1]
    except OSError:
        return 0
