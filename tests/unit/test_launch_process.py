"""Running a command: its output, its end, and everything that it started."""

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from hvdtrain.launch.running.process import Ending, processes_of, run_process
from hvdtrain.launch.running.streams import Stream


class Seen:
    """Collects the output; the launch's id is `id`."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.output: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}
        self.signals: list[signal.Signals] = []
        self.warnings: list[float] = []

    def take(self, stream: Stream, data: bytes) -> None:
        self.output[stream] += data

    def run(self, script: str, **changes: Any) -> Ending:
        return run_process(
            ["/bin/sh", "-c", script],
            **{
                "environment": os.environ,
                "launch_id": self.id,
                "on_output": self.take,
                "on_idle": lambda: None,
                "on_signal": self.signals.append,
                "on_warning": lambda: self.warnings.append(time.monotonic()),
                "has_failed": lambda: False,
                "is_unread": lambda: False,
                **changes,
            },
        )


@pytest.fixture
def seen() -> Seen:
    return Seen()


def in_time(seconds: float, call: Callable[[], Ending]) -> Ending:
    started = time.monotonic()
    ending = call()
    assert time.monotonic() - started < seconds
    return ending


def test_output_and_exit_code(seen: Seen) -> None:
    assert seen.run("echo out; echo err >&2; exit 7") == Ending(7, None)
    assert seen.output == {"stdout": b"out\n", "stderr": b"err\n"}


def test_what_a_command_leaves_behind_is_ended(seen: Seen) -> None:
    assert in_time(10, lambda: seen.run("setsid sleep 600 & echo out")) == Ending(0, None)
    assert processes_of(seen.id) == []
    assert seen.output["stdout"] == b"out\n"


def test_after_a_failure_the_command_must_end(seen: Seen) -> None:
    ending = in_time(10, lambda: seen.run("sleep 20", has_failed=lambda: True))
    assert ending == Ending(-signal.SIGTERM, None)


def test_a_deaf_command_is_killed(seen: Seen) -> None:
    deaf = "trap '' TERM; while true; do sleep 0.1; done"
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    ending = in_time(8, lambda: seen.run(deaf))
    assert ending == Ending(-signal.SIGKILL, signal.SIGINT)
    assert seen.signals == [signal.SIGINT]
    assert processes_of(seen.id) == []


def test_a_second_signal_kills_at_once(seen: Seen) -> None:
    def again(received: signal.Signals) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    deaf = "trap '' INT TERM; while true; do sleep 0.1; done"
    ending = in_time(8, lambda: seen.run(deaf, on_signal=again))
    assert ending == Ending(-signal.SIGKILL, signal.SIGINT, at_once=True)


def test_a_second_signal_leaves_a_callback_that_waits(seen: Seen) -> None:
    def halted(stream: Stream, data: bytes) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    ending = in_time(8, lambda: seen.run("echo out; sleep 600", on_output=halted))
    assert ending == Ending(-signal.SIGKILL, signal.SIGTERM, at_once=True)
    assert processes_of(seen.id) == []


def test_output_that_nobody_reads_ends_the_command_with_grace(seen: Seen) -> None:
    saves = "trap 'echo saved; exit 3' TERM; echo out; while true; do sleep 0.1; done"
    ending = in_time(8, lambda: seen.run(saves, is_unread=lambda: bool(seen.output["stdout"])))
    assert ending == Ending(3, signal.SIGTERM)
    assert seen.output["stdout"] == b"out\nsaved\n"


def test_an_ignored_hangup_stays_ignored(seen: Seen) -> None:
    """nohup ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hangup = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGHUP))
    hangup.start()
    try:
        assert seen.run("sleep 1") == Ending(0, None)
    finally:
        hangup.join()
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_fails_ends_the_command(seen: Seen) -> None:
    def closed(stream: Stream, data: bytes) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        seen.run("echo out; sleep 600", on_output=closed)
    assert processes_of(seen.id) == []


PREPARED = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
signal.signal(signal.SIGUSR1, signal.default_int_handler)
print("warned by", signal.sigtimedwait({signal.SIGUSR1}, 10).si_signo, flush=True)
"""


def test_a_warning_is_passed_on_and_the_run_goes_on(seen: Seen) -> None:
    """Also when it comes before the command is prepared, which it would end."""
    warning = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    warning.start()
    ending = in_time(10, lambda: seen.run(f"sleep 0.5; exec {sys.executable} -c '{PREPARED}'"))
    assert ending == Ending(0, None)
    assert seen.output["stdout"] == f"warned by {int(signal.SIGUSR1)}\n".encode()
    assert (len(seen.warnings), seen.signals) == (1, [])


def test_signals_are_as_before(seen: Seen) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen.run("true")
    assert signal.getsignal(signal.SIGINT) is before
