"""Run a launch command, leaving no processes behind however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from types import FrameType
from typing import Any, Protocol

from hvdtrain.environment import CONTROL_PIPE, GRACE_SECONDS, LAUNCH_ID, STATUS_PIPE
from hvdtrain.launch.running.line_splitter import LONGEST_NEWS, Lines
from hvdtrain.launch.running.output import Output
from hvdtrain.launch.running.processes import (
    Pipes,
    end_launch,
    signal_launch,
    start,
)
from hvdtrain.launch.running.stdin import InputRelay
from hvdtrain.launch.running.time_limits import FAILURE_SECONDS, FORWARDING_SECONDS, TERM_SECONDS
from hvdtrain.signals import ending_signals
from hvdtrain.worker.proc_files import state_of

TICK_SECONDS = 0.1
STACKS_SECONDS = 2.0
"""Time for the ranks' stack traces to arrive before a hung run is ended."""


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        returncode: Return code of the command; negative if a signal killed it.
        received: Signal that the user sent, or None.
        ended: Whether hvdtrain ended the run because it did not end by itself.
    """

    returncode: int
    received: signal.Signals | None
    ended: bool = False


class Run(Protocol):
    """Callbacks of `run_process`: events of the run, and queries about it."""

    def tick(self) -> None:
        """Called several times a second."""

    def take_news(self, line: bytes) -> None:
        """Handle a line that the command wrote to the pipe whose descriptor is in HVDTRAIN_NEWS."""

    def stopping(self, received: signal.Signals) -> None:
        """Handle the first SIGINT, SIGTERM or SIGHUP. A second one ends the run at once."""

    def warning(self) -> None:
        """Handle SIGUSR1; the run continues."""

    def has_failed(self) -> bool:
        """Return whether a rank reported a failure, so that the job has to end."""

    def is_hung(self, command: int) -> bool:
        """Return whether the job of this process ID hangs. If so, its ranks print their stacks and it is ended."""

    def take_orders(self) -> bytes:
        """Return lines for the command's pipe in HVDTRAIN_ORDERS. Called after `is_hung`."""


def run_process(
    argv: Sequence[str],
    run: Run,
    output: Output,
    *,
    environment: Mapping[str, str],
    launch_id: str,
    grace: float = 0.0,
) -> Ending:
    """Run `argv` until it ends or a signal ends it, leaving no processes behind.

    Scripts that handle the user's signal have `grace` seconds. Once `output` has no reader any more, the run is ended
    as by SIGTERM.

    Raises:
        CannotStart: The command cannot be started.
    """
    reading, writing = os.pipe()
    taking, ordering = os.pipe()
    os.set_blocking(ordering, False)
    marks = {
        LAUNCH_ID: launch_id,
        STATUS_PIPE: str(writing),
        CONTROL_PIPE: str(taking),
        GRACE_SECONDS: str(grace),
    }
    with (
        os.fdopen(reading, "rb", buffering=0) as news,
        os.fdopen(ordering, "wb", buffering=0) as orders,
        _recorded_signals() as came,
        _guarded(launch_id),
        InputRelay() as given,
    ):
        try:
            process = start(
                argv, {**environment, **marks}, stdin=given.reading, pass_fds=(writing, taking)
            )
        finally:
            os.close(writing)
            os.close(taking)
        given.start()
        with process, contextlib.closing(Pipes()) as pipes:
            try:
                pipes.add_output(process, "stdout", "stderr")
                pipes.add("news", news)
                watch = _Watch(process, launch_id, came, run, output, grace, orders)
                _read(pipes, watch)
            finally:
                signal_launch(launch_id, signal.SIGKILL)
        received = came.ending[0] if came.ending else None
        return Ending(process.wait(), received, watch.has_ended_it)


def _read(pipes: Pipes, watch: _Watch) -> None:
    """Pass on the command's output until it has ended and all is shown. A signal then ends the wait for a reader."""
    news, run, output = Lines(longest=LONGEST_NEWS), watch.run, watch.output

    def take(came: Iterable[tuple[Any, bytes]]) -> bool:
        """Return whether any of it was output."""
        any_output = False
        for name, data in came:
            if name == "news":
                for line in news.lines(data):
                    run.take_news(line)
            elif data:
                output.feed(name, data)
                any_output = True
        return any_output

    while not watch.is_over():
        run.tick()
        # No more is read than is shown, to bound memory.
        if output.is_behind:
            output.catch_up(TICK_SECONDS)
        elif not take(pipes.read(TICK_SECONDS)):
            output.settle()
    take(pipes.rest("stdout", "stderr"))
    output.finish()
    heard = len(watch.came.ending)
    while output.is_behind and len(watch.came.ending) == heard:
        run.tick()
        output.catch_up(TICK_SECONDS)


@dataclass
class _Watch:
    """Decide on each tick whether the run must be ended, and end it."""

    process: subprocess.Popen[bytes]
    launch_id: str
    came: _Signals
    run: Run
    output: Output
    grace: float
    orders: FileIO
    _warnings_passed_on: int = 0
    _asked_at: float | None = None
    _repeated_at: float | None = None
    _failed_at: float | None = None
    _hung_at: float | None = None
    _terminated_at: float | None = None

    def is_over(self) -> bool:
        """End the run if it is due, and return whether the command has ended."""
        now = time.monotonic()
        self._pass_warnings_on()
        if self._terminated_at is None:
            if self._must_end(now):
                self._terminated_at = now
                signal_launch(self.launch_id, signal.SIGTERM)
        elif now - self._terminated_at > TERM_SECONDS:
            signal_launch(self.launch_id, signal.SIGKILL)
        if len(self.came.ending) > 1:
            # The command hears of it too: only srun itself can end its tasks on other nodes.
            if self._repeated_at is None:
                self._repeated_at = now
                self._send(self.came.ending[1])
            elif now - self._repeated_at > FORWARDING_SECONDS:
                signal_launch(self.launch_id, signal.SIGKILL)
        return self.process.poll() is not None

    @property
    def has_ended_it(self) -> bool:
        """Whether the run was ended by this watch."""
        return self._terminated_at is not None

    def _must_end(self, now: float) -> bool:
        """Return whether the run has used up its time to end by itself."""
        received = self.came.ending
        if not received and self.output.unread:
            received.append(signal.SIGTERM)
        if received and self._asked_at is None:
            self._asked_at = now
            self.run.stopping(received[0])
            self._send(received[0])
        if self._asked_at is not None:
            return now - self._asked_at > self.grace + FORWARDING_SECONDS
        if self._hung_at is None and self.run.is_hung(self.process.pid):
            self._hung_at = now
            self._send(signal.SIGUSR2)
        if orders := self.run.take_orders():
            with contextlib.suppress(OSError):  # The command no longer reads them.
                self.orders.write(orders)
        if self._hung_at is not None:
            return now - self._hung_at > STACKS_SECONDS
        if self.run.has_failed():
            self._failed_at = self._failed_at or now
            return now - self._failed_at > FAILURE_SECONDS
        return False

    def _pass_warnings_on(self) -> None:
        """Send SIGUSR1, which warns the ranks, as soon as the command has a handler for it."""
        if self._warnings_passed_on < len(self.came.warnings) and self._send(signal.SIGUSR1):
            self._warnings_passed_on = len(self.came.warnings)
            self.run.warning()

    def _send(self, number: signal.Signals) -> bool:
        """Send a signal to the command. SIGUSR1 and SIGUSR2 need a handler there, as they would kill it."""
        if self.process.poll() is not None:
            return False
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            try:
                if number not in state_of(self.process.pid).caught:
                    return False
            except OSError:
                return False
        self.process.send_signal(number)
        return True


@contextlib.contextmanager
def _guarded(launch_id: str) -> Iterator[None]:
    """End the launch even if this process is killed by SIGKILL.

    A guard process reads from a pipe that closes when this process ends, and then ends the launch. It is forked because
    a new program would take time to start, and this process may be killed before that.
    """
    reading, writing = os.pipe()
    guard = os.fork()
    if guard == 0:
        try:
            os.setsid()  # Keeps the terminal's Ctrl-C from reaching the guard.
            os.close(writing)
            os.read(reading, 1)
            end_launch(launch_id)
        finally:
            os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        signal_launch(launch_id, signal.SIGKILL)
        os.kill(guard, signal.SIGKILL)  # It may be stopped, and so would miss the end of the pipe.
        os.waitpid(guard, 0)
        os.close(writing)


@dataclass
class _Signals:
    """Signals that this process received."""

    ending: list[signal.Signals] = field(default_factory=list)
    warnings: list[signal.Signals] = field(default_factory=list)

    def note(self, number: int, frame: FrameType | None) -> None:
        kind = self.warnings if number == signal.SIGUSR1 else self.ending
        kind.append(signal.Signals(number))


@contextlib.contextmanager
def _recorded_signals() -> Iterator[_Signals]:
    """Record signals to this process instead of acting on them.

    A handler that is not Python's, such as faulthandler's, stays: Python could not restore it.
    """
    came = _Signals()
    own = {number for number in signal.Signals if callable(signal.getsignal(number))}
    foreign = state_of(os.getpid()).caught - own
    numbers = {*ending_signals(), signal.SIGUSR1} - foreign
    before = {number: signal.signal(number, came.note) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
