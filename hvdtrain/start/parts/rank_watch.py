"""Monitor the ranks of a launch on one host, warn them, and forward signals to them."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hvdtrain.launch.running.processes import signal_launch
from hvdtrain.launch.running.rank_monitor import RankMonitor, RankStatus
from hvdtrain.launch.running.time_limits import TERM_SECONDS
from hvdtrain.worker.proc_files import state_of

LOOK_SECONDS = 1.0
LEAVING_SECONDS = 2.0
"""Time for processes that scripts left behind to end by themselves, after all ranks of the host have gone."""
MOST_NAMED = 5
"""Maximum number of names to report of processes that scripts left behind."""
INTERRUPT_SECONDS = 2.0
"""Time for Ctrl-C to reach a script as KeyboardInterrupt; after that, the script is blocked and will not see it."""
STACKS_SECONDS = 1.0
"""Time for the stack trace of a rank to arrive before the rank is ended."""


@dataclass
class RankWatch:
    """Monitors the ranks of a launch on this host. Call `tick` regularly.

    Attributes:
        launch_id: ID of the launch.
        _warned: Processes that have been warned; None if there was no warning.
        _asked: Signal forwarded to end the run, and the ranks that had a handler for it.
        _to_end: Process IDs of hung ranks, and when to end them.
    """

    launch_id: str
    _monitor: RankMonitor = field(init=False)
    _looked: float = float("-inf")
    _warned: set[int] | None = None
    _asked: tuple[int, frozenset[int]] = (0, frozenset())
    _asked_at: float = 0.0
    _to_end: dict[int, float] = field(default_factory=dict)
    _gone_since: float = 0.0
    _told_left: bool = False

    def __post_init__(self) -> None:
        self._monitor = RankMonitor(self.launch_id)

    def tick(self) -> Iterator[list[RankStatus]]:
        """Yield the state of the ranks, about once a second."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            yield self.look()

    def look(self) -> list[RankStatus]:
        """Return the current state of the ranks. After a warning, also warns those that have since set a handler."""
        self._looked = time.monotonic()
        if self._warned is not None:
            self._warned |= self._send(signal.SIGUSR1, but=self._warned).keys()
        ranks = self._monitor.look()
        for one in ranks:
            if one.state != "gone" and self._to_end.get(one.pid, math.inf) <= self._looked:
                with suppress(OSError):
                    os.kill(one.pid, signal.SIGKILL)
        return [replace(one, ending=self._is_ending(one)) for one in ranks]

    def end(self, pid: int) -> None:
        """End a hung rank, shortly after it has printed its stacks."""
        self._to_end[pid] = time.monotonic() + STACKS_SECONDS
        self._send(signal.SIGUSR2, but=[one for _, one in self._monitor.processes() if one != pid])

    def end_left_behind(self) -> list[str]:
        """End processes that scripts left behind, once all ranks of this host have gone, and return their names, once.

        They may hold the output open, and the launcher would wait for them.
        """
        now = time.monotonic()
        left = self._monitor.left_behind()
        self._gone_since = (self._gone_since or now) if left else 0.0
        late = now - self._gone_since - LEAVING_SECONDS
        if not left or late <= 0:
            return []
        told = []
        for pid, name in left.items():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL if late > TERM_SECONDS else signal.SIGTERM)
                told.append(f"{name} (process {pid})")
        first, self._told_left = not self._told_left, True
        more = len(told) - MOST_NAMED
        return [*told[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])] if first else []

    @property
    def is_left(self) -> bool:
        """Whether there were processes left behind at the last call of `end_left_behind`."""
        return self._gone_since > 0

    def warn(self) -> None:
        """Warn each rank once that the job will end soon, when it has a handler; earlier the signal would kill it."""
        self._warned = set()
        self.look()

    def show_stacks(self) -> None:
        """Make the ranks print their Python stacks to standard error, if they have a handler for that."""
        self._send(signal.SIGUSR2)

    def pass_on(self, number: int) -> None:
        """Forward a signal that ends the run to the ranks with a handler for it, so that their scripts can save."""
        self._asked = number, frozenset(self._send(number).values())
        self._asked_at = time.monotonic()

    def end_missed(self) -> None:
        """End ranks that Horovod's helpers have missed. A helper ends the children of a shell, then stops the shell.

        A rank that the shell starts in between gets no signal, and the helper waits 5 s for it, and as long again for
        the shell. Ranks with a handler for SIGTERM have already received it.
        """
        self._monitor.look(search=True)
        for _, pid in self._monitor.processes():
            with suppress(OSError):
                if signal.SIGTERM not in state_of(pid).caught:
                    os.kill(pid, signal.SIGTERM)
        signal_launch(self.launch_id, signal.SIGCONT)

    def _is_ending(self, one: RankStatus) -> bool:
        number, ranks = self._asked
        if one.rank not in ranks or one.state == "gone" or one.has_ended:
            return False
        # Python itself handles SIGINT; only the heartbeat shows whether the script does.
        fresh = time.monotonic() - self._asked_at < INTERRUPT_SECONDS
        return number != signal.SIGINT or fresh or one.phase == "stopping"

    def _send(self, number: int, but: Container[int] = ()) -> dict[int, int]:
        """Signal the ranks that have a handler for it. Returns their process IDs and ranks."""
        sent = {}
        self._monitor.look(search=True)
        for rank, pid in self._monitor.processes():
            with suppress(OSError):
                if pid not in but and number in state_of(pid).caught:
                    os.kill(pid, number)
                    sent[pid] = rank
        return sent
