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

from hvdtrain.environment import LAUNCH_ID
from hvdtrain.launch.running.streams import Stream
from hvdtrain.signals import ending_signals

TICK_SECONDS = 0.1
TERMINATION_SECONDS = 2.5
"""From SIGTERM to SIGKILL. All is gone within 5 s of Ctrl-C."""
FAILURE_SECONDS = 3.0
"""How long the launcher may take to end the job after a rank reported a failure."""
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


def run_process(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    launch_id: str,
    on_output: Callable[[Stream, bytes], None],
    on_idle: Callable[[], None],
    on_signal: Callable[[signal.Signals], None],
    on_warning: Callable[[], None],
    has_failed: Callable[[], bool],
    is_unread: Callable[[], bool],
) -> Ending:
    """Run `argv` to its end, or until a signal comes; leave no process of it.

    Args:
        environment: the complete environment of the command.
        launch_id: a name that no other launch has.
        on_output: gets what the command writes.
        on_idle: called when nothing was written for a tick.
        on_signal: told about the first SIGINT, SIGTERM or SIGHUP. A second one kills without grace,
            and leaves a callback that waits.
        on_warning: told about each SIGUSR1; the run goes on.
        has_failed: whether a rank reported a failure, so that the job has to end.
        is_unread: whether nobody reads the output any more, which ends the run as SIGTERM does.
    """
    with _recorded_signals() as came, _guarded(launch_id):
        process = subprocess.Popen(
            argv,
            env={**environment, LAUNCH_ID: launch_id},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with process:
            try:
                watch = _Watch(process, launch_id, came.ending, on_signal, has_failed, is_unread)
                passing = _WarningsOn(process, came.warnings, on_warning)
                came.do(lambda: _read(process, watch, passing, on_output, on_idle))
            finally:
                end_processes(launch_id, signal.SIGKILL)
        return Ending(process.wait(), came.ending[0] if came.ending else None, came.left)


def _read(
    process: subprocess.Popen[bytes],
    watch: _Watch,
    passing: _WarningsOn,
    on_output: Callable[[Stream, bytes], None],
    on_idle: Callable[[], None],
) -> None:
    """Pass on what the command writes, until `watch` says that it is over."""
    assert process.stdout is not None and process.stderr is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, "stdout")
        selector.register(process.stderr, selectors.EVENT_READ, "stderr")
        while not watch.is_over(reading=bool(selector.get_map())):
            passing.tick()
            ready = selector.select(TICK_SECONDS)
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if data:
                    on_output(key.data, data)
                else:
                    selector.unregister(key.fileobj)
            if not ready:
                on_idle()


class _Watch:
    """Decides, tick by tick, whether the run must be ended, and ends it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        launch_id: str,
        received: list[signal.Signals],
        on_signal: Callable[[signal.Signals], None],
        has_failed: Callable[[], bool],
        is_unread: Callable[[], bool],
    ) -> None:
        self._process = process
        self._launch_id = launch_id
        self._received = received
        self._on_signal = on_signal
        self._has_failed = has_failed
        self._is_unread = is_unread
        self._failed_at: float | None = None
        self._terminated_at: float | None = None
        self._ended_at: float | None = None

    def is_over(self, reading: bool) -> bool:
        """Whether the command has ended, and no writer is left (`reading`) or worth waiting for."""
        now = time.monotonic()
        if self._terminated_at is None:
            if not self._received and self._is_unread():
                self._received.append(signal.SIGTERM)
            if self._received:
                self._on_signal(self._received[0])
                self._terminate(now)
            elif self._has_failed():
                self._failed_at = self._failed_at or now
                if now - self._failed_at > FAILURE_SECONDS:
                    self._terminate(now)
        elif len(self._received) > 1 or now - self._terminated_at > TERMINATION_SECONDS:
            end_processes(self._launch_id, signal.SIGKILL)
        if self._process.poll() is None:
            return False
        self._ended_at = self._ended_at or now
        return not reading or now - self._ended_at > DRAIN_SECONDS

    def _terminate(self, now: float) -> None:
        self._terminated_at = now
        end_processes(self._launch_id, signal.SIGTERM)


class _WarningsOn:
    """Passes SIGUSR1 on to the command, which warns its ranks, once it is prepared for it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        warnings: list[signal.Signals],
        on_warning: Callable[[], None],
    ) -> None:
        self._process = process
        self._warnings = warnings
        self._on_warning = on_warning
        self._passed_on = 0

    def tick(self) -> None:
        if self._passed_on == len(self._warnings) or self._process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            if signal.SIGUSR1 in state_of(self._process.pid).caught:
                self._passed_on = len(self._warnings)
                self._on_warning()
                self._process.send_signal(signal.SIGUSR1)


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
