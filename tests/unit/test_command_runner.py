"""Running a command: its output, its end, and everything that it started."""

import faulthandler
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable

import pytest

from hvdtrain.launch.running import time_limits
from hvdtrain.launch.running.command_runner import Ending, run_process
from hvdtrain.launch.running.output_parser import Stream
from hvdtrain.launch.running.processes import processes_of
from hvdtrain.start.parts import host_agent
from hvdtrain.worker.proc_files import state_of


class Seen:
    """Collects what a run tells; the launch's id is `id`.

    `failed`, `hung`, `behind` and `is_unread` are what it answers.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.output: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}
        self.news: list[bytes] = []
        self.signals: list[signal.Signals] = []
        self.warnings: list[float] = []
        self.failed = self.hung = False
        self.behind = self.is_unread = lambda: False

    def feed(self, stream: Stream, data: bytes) -> None:
        self.output[stream] += data

    def take_news(self, line: bytes) -> None:
        self.news.append(line)

    def tick(self) -> None:
        pass

    settle = finish = tick

    @property
    def is_behind(self) -> bool:
        return self.behind()

    def catch_up(self, seconds: float) -> None:
        time.sleep(seconds)

    def stopping(self, received: signal.Signals) -> None:
        self.signals.append(received)

    def warning(self) -> None:
        self.warnings.append(time.monotonic())

    def has_failed(self) -> bool:
        return self.failed

    def is_hung(self, command: int) -> bool:
        return self.hung

    def take_orders(self) -> bytes:
        return b""

    @property
    def unread(self) -> bool:
        return self.is_unread()

    def run(self, script: str, grace: float = 0.0) -> Ending:
        argv = ["/bin/sh", "-c", script]
        return run_process(argv, self, self, environment=os.environ, launch_id=self.id, grace=grace)


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


def test_a_guard_that_is_stopped_holds_no_run_open(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = os.fork

    def fork_a_stopped_process() -> int:
        if child := fork():
            os.kill(child, signal.SIGSTOP)
        return child

    monkeypatch.setattr(os, "fork", fork_a_stopped_process)
    assert in_time(10, lambda: seen.run("exit 7")) == Ending(7, None)


def test_after_a_failure_the_command_must_end(seen: Seen) -> None:
    seen.failed = True
    ending = in_time(10, lambda: seen.run("sleep 20"))
    assert ending == Ending(-signal.SIGTERM, None, ended=True)


def test_a_deaf_command_is_killed(seen: Seen) -> None:
    deaf = "trap '' INT TERM; while true; do sleep 0.1; done"
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    ending = in_time(8, lambda: seen.run(deaf))
    assert ending == Ending(-signal.SIGKILL, signal.SIGINT, ended=True)
    assert seen.signals == [signal.SIGINT]
    assert processes_of(seen.id) == []


def test_a_second_signal_kills_at_once(seen: Seen) -> None:
    def again(received: signal.Signals) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    deaf = "trap '' INT TERM; while true; do sleep 0.1; done"
    seen.stopping = again  # type: ignore[method-assign]
    ending = in_time(8, lambda: seen.run(deaf, grace=30))
    assert ending == Ending(-signal.SIGKILL, signal.SIGINT)


def test_no_more_is_read_than_is_shown(seen: Seen) -> None:
    """And signals are heard all the same."""
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    interrupt.start()
    seen.behind = lambda: not seen.signals and bool(seen.output["stdout"])
    ending = in_time(8, lambda: seen.run("while true; do echo out; done"))
    assert ending == Ending(-signal.SIGTERM, signal.SIGTERM)
    assert len(seen.output["stdout"]) < 1 << 20, (
        "what one look at the pipes brings, and what was in them at the end"
    )
    assert processes_of(seen.id) == []


def test_output_that_nobody_reads_ends_the_command_with_grace(seen: Seen) -> None:
    saves = "trap 'echo saved; exit 3' TERM; echo out; while true; do sleep 0.1; done"
    seen.is_unread = lambda: bool(seen.output["stdout"])
    ending = in_time(8, lambda: seen.run(saves))
    assert ending == Ending(3, signal.SIGTERM)
    assert seen.output["stdout"] == b"out\nsaved\n"


def test_grace_is_for_a_command_that_uses_it(seen: Seen) -> None:
    saves = "trap 'sleep 6; echo saved; exit 3' TERM; echo out; while true; do sleep 0.1; done"
    terminate = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    terminate.start()
    assert seen.run(saves, grace=20) == Ending(3, signal.SIGTERM)
    assert seen.output["stdout"] == b"out\nsaved\n"


def test_a_run_that_hangs_shows_its_stacks_and_ends(seen: Seen) -> None:
    listens = "trap 'echo stacks' USR2; echo out; while true; do sleep 0.1; done"
    seen.is_hung = lambda command: bool(seen.output["stdout"])  # type: ignore[method-assign]
    ending = in_time(8, lambda: seen.run(listens))
    assert ending == Ending(-signal.SIGTERM, None, ended=True)
    assert seen.output["stdout"] == b"out\nstacks\n"


def test_news_come_line_by_line(seen: Seen) -> None:
    pipe = "/proc/self/fd/$HVDTRAIN_NEWS"
    tells = f"for i in 1 2; do printf a$i >{pipe}; sleep 0.3; echo b$i >{pipe}; done"
    assert seen.run(tells) == Ending(0, None)
    assert seen.news == [b"a1b1\n", b"a2b2\n"]


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

    seen.feed = closed  # type: ignore[method-assign]
    with pytest.raises(BrokenPipeError):
        seen.run("echo out; sleep 600")
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


def test_a_handler_of_faulthandler_stays(seen: Seen) -> None:
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    try:
        seen.run("true")
        assert signal.SIGUSR1 in state_of(os.getpid()).caught
    finally:
        faulthandler.unregister(signal.SIGUSR1)


def test_whoever_ends_a_run_waits_longer_than_those_below() -> None:
    assert time_limits.REPEAT_SECONDS <= time_limits.FORWARDING_SECONDS, (
        "the launcher may be deaf to the first signal"
    )
    assert time_limits.RUN_SECONDS <= 5, "of Ctrl-C, where scripts handle no signals"
    assert (
        time_limits.END_SECONDS
        < time_limits.RUN_SECONDS
        < time_limits.COMMAND_SECONDS
        < time_limits.ENDING_SECONDS
    )
    assert time_limits.COMMAND_SECONDS < host_agent.SILENCE_SECONDS
