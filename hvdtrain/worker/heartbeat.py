"""Heartbeat: the current phase of a rank, which its host's agent can read at any moment, even if the rank is frozen.

A rank keeps one page of memory that has a name (memfd_create) but no file. The agent finds it among the rank's open
files in /proc and reads it; the rank writes its phase and step there in about a microsecond, without sending or waiting
for anything. The page disappears with the rank. Its name contains the launch id, so that ranks are recognized even
if they have overwritten their environment, as programs do that set their title in `ps`.
"""

from __future__ import annotations

import functools
import mmap
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvdtrain.environment import LAUNCH_ID
from hvdtrain.errors import UsageError
from hvdtrain.worker.proc_files import folder_of

Phase = Literal[
    "starting",
    "init",
    "script",
    "training",
    "input",
    "evaluating",
    "predicting",
    "saving",
    "callbacks",
    "stopping",
    "ended",
]
"""starting: before Horovod's init; init: inside it; script: in the script's own code; input: between two steps;
stopping: after Ctrl-C, which the script may catch; ended: after the end of the script."""

WITH_BEATS = {"init", "training", "input", "evaluating", "predicting", "saving", "callbacks"}
"""Phases in which the heartbeat must continue. A script's own loop may have none."""

INIT = "hvdtrain.init()"
_WORDS: dict[Phase, str] = {
    "starting": "start-up",
    "init": INIT,
    "script": "the script",
    "input": "data input",
    "evaluating": "evaluation",
    "predicting": "prediction",
    "stopping": "the handling of Ctrl-C",
    "ended": "shutdown",
}
"""Nouns for the phases, for "rank 3: in ..."; the names of other phases are nouns already."""
_NAME = "hvdtrain-heartbeat"
_LINK = f"/memfd:{_NAME}-"
# Number of the write, step, rank, time (CLOCK_MONOTONIC, the same for all processes of a host), allowed seconds,
# whether the rank waits, phase, detail, and the number again: two different numbers mean that a write is in progress.
_PAGE = struct.Struct("=Qqqdd?16s103sQ")


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank when its page was read.

    Attributes:
        phase: Phase of the rank, see Phase.
        step: Index of the last step that it began, from 0; -1 before the first.
        detail: Name of the collective in which it waits, or of a long phase; empty otherwise.
        waiting: Whether it waits in the collective `detail`.
        since: Time of the last heartbeat, in seconds of CLOCK_MONOTONIC on its host.
        allowed: Seconds requested with `long_phase`; 0 if none.
        rank: Rank in an elastic job since the last init; -1 before it, and in other jobs, where ranks do not change.
    """

    phase: Phase = "starting"
    step: int = -1
    detail: str = ""
    waiting: bool = False
    since: float = 0.0
    allowed: float = 0.0
    rank: int = -1

    @property
    def place(self) -> str:
        """Position in the script, in words that are equal for ranks that do the same."""
        if self.waiting and not self.detail:
            return INIT
        words = words_of(self.phase)
        if self.step >= 0 and self.phase in ("training", "input", "evaluating", "predicting"):
            words += f", step {self.step + 1}"
        if self.waiting:
            return f"{words}, collective {self.detail}"
        return f"{words} ({self.detail})" if self.detail else words


Span = tuple[Phase, str, float, float]
"""A phase, its detail, and the times of CLOCK_MONOTONIC in seconds at which it began and ended."""


def words_of(phase: Phase) -> str:
    """Return a noun for the phase."""
    return _WORDS.get(phase, phase)


def beat(
    phase: Phase,
    step: int | None = None,
    detail: str = "",
    *,
    waiting: bool = False,
    allowed: float = 0.0,
    rank: int | None = None,
) -> None:
    """Record progress of this rank, and its current phase. `step`, `rank`: None leaves them unchanged."""
    page = _own_page()
    if page is not None:
        page.write(phase, step, detail, waiting, allowed, rank)


def current() -> Heartbeat:
    """Return the last heartbeat of this rank."""
    page = _own_page()
    return Heartbeat() if page is None else page.read()


def own_seconds() -> dict[Phase, float]:
    """Return the seconds that this rank has spent in each phase so far, except those of waiting in collectives."""
    page = _own_page()
    return {} if page is None else page.own_seconds()


@contextmanager
def traced() -> Iterator[list[Span]]:
    """Collect this rank's phases, and waits in collectives, within the block; all are there when it has ended."""
    spans: list[Span] = []
    page = _own_page()
    if page is None:
        yield spans
        return
    page.own_seconds()
    page.spans = spans
    try:
        yield spans
    finally:
        page.own_seconds()
        page.spans = None


@contextmanager
def in_phase(
    phase: Phase, detail: str = "", *, waiting: bool = False, allowed: float = 0.0
) -> Iterator[None]:
    """Set this rank's phase within the block; restore the previous phase afterwards."""
    before = current()
    beat(phase, None, detail, waiting=waiting, allowed=allowed)
    try:
        yield
    finally:
        beat(before.phase, None, before.detail, waiting=before.waiting, allowed=before.allowed)


@contextmanager
def long_phase(name: str, minutes: float) -> Iterator[None]:
    """Announce a phase that takes long, so that the watchdog of `hvdtrain run` waits for it.

        with hvdtrain.long_phase("download", minutes=30):
            fetch(data)

    Horovod's stall check still applies to other ranks that meanwhile wait in a collective. If only some ranks take
    long, raise `hvdtrain run --stall-shutdown-seconds`.

    Args:
        name: Name of the phase, for messages; cut to 103 bytes of UTF-8.
        minutes: Time after which the rank counts as hung; more than 0.

    Raises:
        UsageError: `minutes` is not more than 0.
    """
    if not minutes > 0:
        raise UsageError(f"long_phase({name!r}): minutes must be positive, not {minutes}")
    with in_phase(current().phase, name, allowed=60.0 * minutes):
        yield


class Page:
    """The page of this process or, read-only, of another one.

    Attributes:
        inode: Inode of the page, unique on its host; processes forked by a rank share its page.
        spans: Where to add each phase that ends; None: nowhere.
    """

    def __init__(self, descriptor: int, *, own: bool) -> None:
        access = mmap.ACCESS_WRITE if own else mmap.ACCESS_READ
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE, access=access)
        self.inode = os.fstat(descriptor).st_ino
        self._owner = os.getpid()
        self._writes = 0
        self._step = self._rank = -1
        self.spans: list[Span] | None = None
        self._now: tuple[Phase, str, bool, float] = ("starting", "", False, time.monotonic())
        self._own: dict[Phase, float] = {}

    def write(
        self,
        phase: Phase,
        step: int | None,
        detail: str,
        waiting: bool,
        allowed: float,
        rank: int | None,
    ) -> None:
        if os.getpid() != self._owner:
            return  # A process forked by the rank shares its page.
        now = time.monotonic()
        self._count(now)
        self._now = phase, detail, waiting, now
        self._writes += 1
        self._step = self._step if step is None else step
        self._rank = self._rank if rank is None else rank
        self._memory[: _PAGE.size] = _PAGE.pack(
            *(self._writes, self._step, self._rank, now, allowed, waiting),
            *(phase.encode(), detail.encode(errors="replace")[:103], self._writes),
        )

    def own_seconds(self) -> dict[Phase, float]:
        """Return the seconds in each phase so far, except those of waiting in collectives."""
        now = time.monotonic()
        self._count(now)
        self._now = (*self._now[:3], now)
        return dict(self._own)

    def _count(self, now: float) -> None:
        phase, detail, waiting, since = self._now
        if self.spans is not None:
            self.spans.append((phase, detail, since, now))
        if not waiting:
            self._own[phase] = self._own.get(phase, 0.0) + now - since

    def read(self) -> Heartbeat:
        """Return the last heartbeat; raise ValueError if the page is being written at each attempt."""
        for _ in range(100):
            number, step, rank, since, allowed, waiting, phase, detail, last = _PAGE.unpack_from(
                self._memory
            )
            if number == last != 0:
                return Heartbeat(_text(phase), step, _text(detail), waiting, since, allowed, rank)
            if last == 0:
                return Heartbeat()
        raise ValueError("a heartbeat that is never complete")


def _text(field: bytes) -> Any:
    return field.rstrip(b"\0").decode(errors="replace")


@functools.cache
def _own_page() -> Page | None:
    """Return this process's page, created on first use; None if the system has no memfd_create."""
    with suppress(AttributeError, OSError):
        descriptor = os.memfd_create(f"{_NAME}-{os.environ.get(LAUNCH_ID, '')}")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return Page(descriptor, own=True)
    return None


def page_of(pid: int) -> Page | None:
    """Return the page of another process of this user; None if it has none or has ended."""
    with suppress(OSError, ValueError):
        for link, _ in _pages(pid):
            with suppress(OSError):
                descriptor = os.open(link, os.O_RDONLY)
                try:
                    return Page(descriptor, own=False)
                finally:
                    os.close(descriptor)
    return None


def has_page_of(pid: int, launch_id: str) -> bool:
    """Return whether the process is a rank of this launch, or was forked by one."""
    with suppress(OSError):
        return any(name == f"{_LINK}{launch_id} (deleted)" for _, name in _pages(pid))
    return False


def _pages(pid: int) -> Iterator[tuple[Path, str]]:
    """Yield a process's own pages among its open files, as (link to open, name) pairs.

    Processes that watch ranks have those ranks' pages open too, but read-only.
    """
    for link in (folder_of(pid) / "fd").iterdir():
        with suppress(OSError):
            name = os.readlink(link)  # noqa: PTH115
            if name.startswith(_LINK) and link.lstat().st_mode & stat.S_IWUSR:
                yield link, name
