"""Run a launch command so that, however it ends, nothing of it is left behind.

horovodrun's ranks are not simply its children: over Gloo each hangs under a helper process in a
session of its own, mpirun puts each in its own process group. So every process of a run carries the
launch's id in its environment, and is found by it in /proc. (Processes on other hosts are ended by
mpirun or by ssh's end.)
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Protocol

from hvdtrain.environment import GRACE_SECONDS, LAUNCH_ID, NEWS
from hvdtrain.launch.running.stdin import InputRelay
from hvdtrain.launch.running.streams import Stream
from hvdtrain.signals import ending_signals

TICK_SECONDS = 0.1
TERMINATION_SECONDS = 2.5
"""From SIGTERM to SIGKILL. Without a script that wants its grace, all is gone within 5 s of Ctrl-C."""
FAILURE_SECONDS = 3.0
"""How long the launcher may take to end the job after a rank reported a failure."""
PASSING_SECONDS = 2.0
"""How much longer than the grace a launcher may take to pass a signal on, and to end its ranks."""
STACKS_SECONDS = 2.0
"""For the ranks' stacks to arrive, before a run that hangs is ended."""
DRAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        returncode: of its command (negative: a signal).
        received: the user's signal, if any.
        at_once: whether the user's second signal cut it short: the rest of its output is unread.
    """

    returncode: int
    received: signal.Signals | None
    at_once: bool = False


class Run(Protocol):
    """What `run_process` tells of a run, and asks about it."""

    def take_output(self, stream: Stream, data: bytes) -> None:
        """The command has written this."""

    def take_news(self, line: bytes) -> None:
        """The command has told this on the pipe whose descriptor is in HVDTRAIN_NEWS."""

    def idle(self) -> None:
        """Nothing was written for a tick."""

    def stopping(self, received: signal.Signals) -> None:
        """The first SIGINT, SIGTERM or SIGHUP came. A second one kills without grace, and leaves a call that waits."""

    def warning(self) -> None:
        """SIGUSR1 came; the run goes on."""

    def has_failed(self) -> bool:
        """Whether a rank reported a failure, so that the job has to end."""

    def is_hung(self) -> bool:
        """Whether the job cannot go on, and has to end once its ranks have shown their stacks."""

    def is_unread(self) -> bool:
        """Whether nobody reads the output any more, which ends the run as SIGTERM does."""


def run_process(
    argv: Sequence[str],
    run: Run,
    *,
    environment: Mapping[str, str],
    launch_id: str,
    grace: float = 0.0,
) -> Ending:
    """Run `argv` to its end, or until a signal comes; leave no process of it.

    Args:
        run: is told what happens.
        environment: the complete environment of the command.
        launch_id: a name that no other launch has.
        grace: seconds for scripts that have a handler for the user's signal.
    """
    reading, writing = os.pipe()
    with (
        os.fdopen(reading, "rb", buffering=0) as news,
        _recorded_signals() as came,
        _guarded(launch_id),
        InputRelay() as given,
    ):
        process = subprocess.Popen(
            argv,
            env={
                **environment,
                LAUNCH_ID: launch_id,
                NEWS: str(writing),
                GRACE_SECONDS: str(grace),
            },
            stdin=given.reading,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(writing,),
        )
        os.close(writing)
        given.start()
        with process:
            try:
                watch = _Watch(process, launch_id, came, run, grace)
                came.do(lambda: _read(process, news, watch, run))
            finally:
                end_processes(launch_id, signal.SIGKILL)
        return Ending(process.wait(), came.ending[0] if came.ending else None, came.left)


def _read(process: subprocess.Popen[bytes], news: BinaryIO, watch: _Watch, run: Run) -> None:
    """Pass on what the command writes, until `watch` says that it is over."""
    assert process.stdout is not None and process.stderr is not None
    held = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, "stdout")
        selector.register(process.stderr, selectors.EVENT_READ, "stderr")
        selector.register(news, selectors.EVENT_READ, "news")
        while not watch.is_over(reading=any(k.data != "news" for k in selector.get_map().values())):
            ready = selector.select(TICK_SECONDS)
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.data == "news":
                    *lines, held = (held + data).split(b"\n")
                    for line in lines:
                        run.take_news(line)
                else:
                    run.take_output(key.data, data)
            if all(key.data == "news" for key, _ in ready):
                run.idle()


class _Watch:
    """Decides, tick by tick, whether the run must be ended, and ends it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        launch_id: str,
        came: _Signals,
        run: Run,
        grace: float,
    ) -> None:
        self._process = process
        self._launch_id = launch_id
        self._came = came
        self._run = run
        self._grace = grace
        self._warnings_passed_on = 0
        self._asked_at: float | None = None
        self._failed_at: float | None = None
        self._hung_at: float | None = None
        self._terminated_at: float | None = None
        self._ended_at: float | None = None

    def is_over(self, reading: bool) -> bool:
        """Whether the command has ended, and no writer is left (`reading`) or worth waiting for."""
        now = time.monotonic()
        self._pass_warnings_on()
        if self._terminated_at is None:
            if self._must_end(now):
                self._terminated_at = now
                end_processes(self._launch_id, signal.SIGTERM)
        elif now - self._terminated_at > TERMINATION_SECONDS:
            end_processes(self._launch_id, signal.SIGKILL)
        if len(self._came.ending) > 1:
            end_processes(self._launch_id, signal.SIGKILL)
        if self._process.poll() is None:
            return False
        self._ended_at = self._ended_at or now
        return not reading or now - self._ended_at > DRAIN_SECONDS

    def _must_end(self, now: float) -> bool:
        """Whether the time that everything had to end by itself is over."""
        received = self._came.ending
        if not received and self._run.is_unread():
            received.append(signal.SIGTERM)
        if received and self._asked_at is None:
            self._asked_at = now
            self._run.stopping(received[0])
            self._send(received[0])
        if self._asked_at is not None:
            return now - self._asked_at > self._grace + PASSING_SECONDS
        if self._hung_at is None and self._run.is_hung():
            self._hung_at = now
            self._send(signal.SIGUSR2)
        if self._hung_at is not None:
            return now - self._hung_at > STACKS_SECONDS
        if self._run.has_failed():
            self._failed_at = self._failed_at or now
            return now - self._failed_at > FAILURE_SECONDS
        return False

    def _pass_warnings_on(self) -> None:
        """SIGUSR1 to the command, which warns its ranks, once it is prepared for it."""
        if self._warnings_passed_on < len(self._came.warnings) and self._send(signal.SIGUSR1):
            self._warnings_passed_on = len(self._came.warnings)
            self._run.warning()

    def _send(self, number: signal.Signals) -> bool:
        """Send it to the command, unless that would only be ended by what is not meant to; return whether."""
        if self._process.poll() is not None:
            return False
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            try:
                if number not in state_of(self._process.pid).caught:
                    return False
            except OSError:
                return False
        self._process.send_signal(number)
        return True


@dataclass(frozen=True)
class ProcessState:
    """What /proc tells of one process: its parent's id, and the signals that it has handlers for."""

    parent: int
    caught: frozenset[int]


def parse_status(text: str) -> ProcessState:
    """The state in /proc/PID/status."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    bits = int(fields["SigCgt"], 16)
    return ProcessState(
        int(fields["PPid"]),
        frozenset(number for number in range(1, 65) if bits >> (number - 1) & 1),
    )


def state_of(pid: int) -> ProcessState:
    """Raises OSError for a process that has ended, and without /proc."""
    return parse_status((Path("/proc") / str(pid) / "status").read_text())


def processes_of(launch_id: str) -> list[int]:
    """The ids of all processes of this user that belong to the launch; none without /proc."""
    mark = f"{LAUNCH_ID}={launch_id}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Other users' processes cannot be read, and processes end while we look.
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end_processes(launch_id: str, how: signal.Signals) -> None:
    """Send `how` to all processes of the launch; SIGKILL is repeated until none starts another."""
    for _ in range(20):
        found = processes_of(launch_id)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        if not found or how != signal.SIGKILL:
            return
        time.sleep(TICK_SECONDS / 2)


@contextlib.contextmanager
def _guarded(launch_id: str) -> Iterator[None]:
    """Even SIGKILL of this process leaves nothing behind: a guard outlives it, and ends the launch.

    The guard waits for the end of a pipe, which comes when this process ends in whatever way.
    """
    reading, writing = os.pipe()
    guard = os.fork()
    if guard == 0:
        try:
            os.setsid()  # Ctrl-C in the terminal is not for the guard.
            os.close(writing)
            os.read(reading, 1)
            if processes_of(launch_id):
                end_processes(launch_id, signal.SIGTERM)
                time.sleep(TERMINATION_SECONDS)
                end_processes(launch_id, signal.SIGKILL)
        finally:
            os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(guard, 0)


class _AtOnce(BaseException):
    """The second signal: whatever is being done, it is left."""


@dataclass
class _Signals:
    """What came to this process.

    Attributes:
        ending: signals that end the run.
        warnings: SIGUSR1, as often as it came.
        left: whether a second ending signal left what was being done.
    """

    ending: list[signal.Signals] = field(default_factory=list)
    warnings: list[signal.Signals] = field(default_factory=list)
    left: bool = False
    _may_leave: bool = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.warnings.append(signal.Signals(number))
            return
        self.ending.append(signal.Signals(number))
        # Python goes on with a write that a signal interrupts, unless its handler raises.
        if self._may_leave and len(self.ending) > 1:
            self._may_leave = False
            raise _AtOnce

    def do(self, work: Callable[[], None]) -> None:
        """Do it to its end, or to the second signal."""
        try:
            self._may_leave = True
            try:
                work()
            finally:
                self._may_leave = False
        except _AtOnce:
            self.left = True


@contextlib.contextmanager
def _recorded_signals() -> Iterator[_Signals]:
    """Signals to this process are noted instead of ending it."""
    came = _Signals()
    numbers = (*ending_signals(), signal.SIGUSR1)
    before = {number: signal.signal(number, came.note) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
