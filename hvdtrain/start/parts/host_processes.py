"""Processes started by an agent itself, whose output and exit codes are reported as news."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdtrain.environment import EXIT_SIGNAL_BASE
from hvdtrain.launch.running.processes import (
    DRAIN_SECONDS,
    CannotStart,
    Pipes,
    end_groups,
    has_ended,
    start,
)
from hvdtrain.launch.running.time_limits import TERM_SECONDS
from hvdtrain.launch.running.watchdog import STILL_SECONDS
from hvdtrain.signals import shell_code
from hvdtrain.worker.proc_files import state_of

LONGEST_TICK_SECONDS = 1.0
"""A longer interval between ticks means that this process was stopped as well."""
STOPPED = EXIT_SIGNAL_BASE + signal.SIGSTOP
"""Exit code reported for a process that was ended because it was stopped for too long."""


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    ended_at: float | None = None
    stopped_for: float = 0.0


@dataclass
class HostProcesses:
    """Processes by number. The kernel kills them if this process is killed.

    Attributes:
        pipes: Receives their output pipes, named (number, descriptor).
        tell: Function called with news: output=[number, descriptor, text], ended=[number, exit code].
        still: Seconds after which a stopped process (SIGSTOP) is ended.
    """

    pipes: Pipes
    tell: Callable[..., None]
    still: float = STILL_SECONDS
    _running: dict[int, _Process] = field(default_factory=dict)
    _to_warn: set[int] = field(default_factory=set)
    _ticked: float = float("inf")

    def start(self, number: int, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a process in its own session."""
        try:
            popen = start(argv, environ, stdin=subprocess.DEVNULL, dies_with_us=True)
        except CannotStart as error:
            self.tell(output=[number, 2, f"{error}\n"])
            self.tell(ended=[number, error.exit_code])
            return
        self._running[number] = _Process(popen)
        self.pipes.add_output(popen, (number, 1), (number, 2))

    def pass_on(self, name: tuple[int, int], data: bytes) -> None:
        """Report output of a process."""
        if data:
            # latin-1 maps every byte to one character.
            self.tell(output=[*name, data.decode("latin-1")])

    def warn(self, number: int) -> None:
        """Send SIGUSR1 to a process as soon as it has a handler; before that the signal would kill it."""
        self._to_warn.add(number)

    def tick(self) -> None:
        """Report processes that have ended, after all of their output, and send warnings that are due."""
        now = time.monotonic()
        passed = min(max(0.0, now - self._ticked), LONGEST_TICK_SECONDS)
        self._ticked = now
        for number, one in list(self._running.items()):
            if not has_ended(one.popen):
                self._look_at(one, passed)
                continue
            own = (number, 1), (number, 2)
            one.ended_at = one.ended_at or now
            # Processes that it left behind may hold its pipes open.
            if self.pipes.names & set(own) and now - one.ended_at < DRAIN_SECONDS:
                continue
            self.pipes.drop(*own)
            end_groups([one.popen], 0.0)
            del self._running[number]
            is_frozen = one.stopped_for >= self.still
            code = STOPPED if is_frozen else shell_code(one.popen.returncode)
            self.tell(ended=[number, code])
        for number in list(self._to_warn):
            waiting = self._running.get(number)
            with contextlib.suppress(OSError):
                if waiting is not None and signal.SIGUSR1 in state_of(waiting.popen.pid).caught:
                    self._to_warn.discard(number)
                    waiting.popen.send_signal(signal.SIGUSR1)

    def _look_at(self, one: _Process, passed: float) -> None:
        """End a process that has been stopped for too long, as the others would wait for it forever."""
        with contextlib.suppress(OSError):
            if state_of(one.popen.pid).stopped:
                one.stopped_for += passed
            elif one.stopped_for < self.still:  # Otherwise it was killed and is ending.
                one.stopped_for = 0.0
            if one.stopped_for >= self.still:
                one.popen.kill()

    def end(self) -> None:
        """End all processes. Their remaining output is lost."""
        end_groups([one.popen for one in self._running.values()], TERM_SECONDS)
