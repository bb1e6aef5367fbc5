"""What is done for the ranks of a launch on one host: look after them, warn them, pass signals on to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hvdtrain.launch.running.lookout import Lookout, RankStatus
from hvdtrain.launch.running.process import state_of
from hvdtrain.launch.running.ranks import Warner

LOOK_SECONDS = 1.0
LEAVING_SECONDS = 2.0
"""What scripts have left behind may take to end by itself when all ranks of the host have gone."""
GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL."""
INTERRUPT_SECONDS = 2.0
"""Within which Ctrl-C must have reached a script as KeyboardInterrupt, else it is blocked and will not see it."""


@dataclass
class HostWatch:
    """The ranks of a launch on this host. Call `tick` again and again."""

    launch_id: str
    _lookout: Lookout = field(init=False)
    _warner: Warner = field(init=False)
    _looked: float = float("-inf")
    _asked: dict[int, int] = field(default_factory=dict)
    _asked_at: float = 0.0
    _gone_since: float = 0.0
    _told_left: bool = False

    def __post_init__(self) -> None:
        self._lookout = Lookout(self.launch_id)
        self._warner = Warner(self.launch_id)

    def tick(self) -> Iterator[list[RankStatus]]:
        """Give what the ranks do, about once a second, and warn those that were not ready for it before."""
        self._warner.tick()
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            yield self.look()

    def look(self) -> list[RankStatus]:
        """What the ranks do now."""
        self._looked = time.monotonic()
        return [replace(one, ending=self._is_ending(one)) for one in self._lookout.look()]

    def end_left_behind(self) -> list[str]:
        """End what scripts have left behind when all ranks of this host have gone; return what was told to end now.

        It may hold the output open, for which the launcher would wait.
        """
        if not self._gone_since and not self._lookout.left_behind():
            return []
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        told = []
        if now - self._gone_since > LEAVING_SECONDS:
            late = now - self._gone_since > LEAVING_SECONDS + GRACE_SECONDS
            for pid, name in self._lookout.left_behind().items():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                    if not self._told_left:
                        told.append(f"{name} (process {pid})")
            self._told_left = True
        return told

    def warn(self) -> None:
        """Warn all ranks that this job will be ended soon."""
        self._warner.warn()

    def show_stacks(self) -> None:
        """Have the ranks that listen for it print their Python stacks on their standard error."""
        self._send(signal.SIGUSR2)

    def pass_on(self, number: int) -> None:
        """Pass on a signal that ends the run to the ranks that do something at it: their scripts may save."""
        self._asked = self._send(number)
        self._asked_at = time.monotonic()

    def _is_ending(self, one: RankStatus) -> bool:
        number = self._asked.get(one.rank)
        if number is None or one.state == "gone" or one.has_ended:
            return False
        # Python itself listens to SIGINT: only the rank's word tells that the script does.
        fresh = time.monotonic() - self._asked_at < INTERRUPT_SECONDS
        return number != signal.SIGINT or fresh or one.phase == "stopping"

    def _send(self, number: int) -> dict[int, int]:
        """Send it to all ranks that have a handler for it; return rank -> signal."""
        sent = {}
        self._lookout.look(search=True)
        for rank, pid in self._lookout.processes():
            with suppress(OSError):
                if number in state_of(pid).caught:
                    os.kill(pid, number)
                    sent[rank] = number
        return sent
