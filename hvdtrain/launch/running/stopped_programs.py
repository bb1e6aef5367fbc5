"""Programs between `hvdtrain run` and its ranks that are stopped: nobody else looks after them, and a run cannot end
without them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.launch.running.processes import environment_of
from hvdtrain.rank_variables import is_rank

LOOK_SECONDS = 2.0
PAUSE_SECONDS = 5.0
"""Between two looks: then this process itself was stopped, and the others may have been as well."""


@dataclass
class StoppedPrograms:
    """Looks at a launch command and at what it has started on this host, down to the ranks.

    Attributes:
        still: seconds after which a stopped program counts.
    """

    still: float
    _since: dict[int, float] = field(default_factory=dict)
    _looked: float = float("-inf")
    _reason: str = ""

    def reason(self, command: int) -> str:
        """Which of them has been stopped for too long; empty if none has. Call regularly.

        Args:
            command: the process id of the launch command.
        """
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            if now - self._looked > PAUSE_SECONDS:
                self._since.clear()
            self._looked = now
            self._since = {pid: self._since.get(pid, now) for pid in _stopped(command)}
            late = (pid for pid, since in self._since.items() if now - since >= self.still)
            self._reason = next(filter(None, map(_sentence, late)), "")
        return self._reason


def _sentence(pid: int) -> str:
    """The message about a stopped program; empty if it has ended meanwhile."""
    try:
        command = (Path("/proc") / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return ""
    program = Path(command.partition("\0")[0]).name
    return (
        f"{program} (process {pid}), which starts the ranks and waits for them, is stopped (SIGSTOP): "
        "what stopped it? `kill -CONT` lets it go on"
    )


def _stopped(pid: int) -> Iterator[int]:
    """Those of a process and its descendants that are stopped, without the ranks and what these have started."""
    with suppress(OSError):
        if is_rank(environment_of(pid)):
            return
        process = Path("/proc") / str(pid)
        if (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T":
            yield pid
        for thread in (process / "task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _stopped(int(child))
