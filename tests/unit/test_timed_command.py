"""Commands within a time: the signals that end them with the one who started them."""

import os
import signal
import subprocess
import time

import pytest
from click.testing import CliRunner

from hvdtrain.cli.command_table import main
from hvdtrain.install import build, build_environment, recipe
from hvdtrain.launch.running import timed_command
from hvdtrain.launch.running.timed_command import (
    CompletedCommand,
    ask,
    end_all,
    ending_commands,
    run,
)
from hvdtrain.signals import leaving_on_signals


def sh(lines: str, limit: float = 20.0, stdin: str = "") -> CompletedCommand:
    said = run(
        ["/bin/sh", "-c", lines], limit=limit, environ={"PATH": "/usr/bin:/bin"}, stdin=stdin
    )
    assert said is not None
    return said


def test_a_command_that_writes_without_end_is_kept_in_part() -> None:
    said = sh("echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last", limit=60)
    assert (said.returncode, said.last_line) == (0, "last")
    assert said.stdout.startswith("first\nxxx")
    assert len(said.stdout) < 1_000_000
    endless = sh("yes", limit=0.5)
    assert endless.returncode is None
    assert len(endless.stdout) < 1_000_000


def test_a_command_that_the_system_does_not_start() -> None:
    assert run(["/no/such/program"], limit=1, environ={}) is None
    said = run(["/bin/true"], limit=1, environ={"LONG": "x" * 1_000_000})
    assert said is not None and said.returncode
    assert said.last_line == "cannot start /bin/true: Argument list too long"


def test_what_is_no_text() -> None:
    assert sh(r"printf '\377\n'; printf '\000\376' >&2").text == "\ufffd\n\0\ufffd"


def test_input_that_nobody_reads() -> None:
    assert sh("exec 0<&-; sleep 0.2; echo done", stdin="x" * 1_000_000).stdout == "done\n"
    assert sh("wc -c", stdin="x" * 1_000_000).stdout.strip() == "1000000"


def test_a_process_without_the_mark_does_not_hold_its_caller() -> None:
    """Started with another environment, in a session of its own; it ends by itself."""
    began = time.monotonic()
    said = sh("env -i setsid sleep 12 & exit 3", limit=1)
    assert said.returncode is None, "its output has not ended"
    assert time.monotonic() - began < 10


def test_an_answer_and_none() -> None:
    """What it started for good stays, as a job does and a daemon; what holds its output does not hold the asker."""
    assert ask(["/bin/sh", "-c", "echo yes; echo note >&2"]).answer == "yes\n"
    assert ask(["/bin/sh", "-c", "echo yes; exit 3"]).answer == ""
    assert ask(["no-such-program"]).last_line == "no-such-program is not installed"
    began = time.monotonic()
    said = ask(["/bin/sh", "-c", "sleep 9 & exec sleep 9"], limit=0.3)
    assert (said.answer, said.returncode) == ("", None)
    assert said.last_line == f"no answer within {said.seconds:.0f} s"
    assert time.monotonic() - began < 5
    daemon = ask(["/bin/sh", "-c", "setsid sleep 9 >/dev/null 2>&1 & echo $!"]).answer
    os.kill(int(daemon), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_take_the_way_out(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left, ending_commands():
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert left.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_an_ignored_hangup_is_no_way_out() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with leaving_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_installation_ends_with_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def install(*_: object, **__: object) -> bool:
        try:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(10)
        finally:
            ended.append("the build")
        return True

    monkeypatch.setattr(build_environment, "survey", lambda **_: object())
    monkeypatch.setattr(build_environment, "missing_tools", lambda *_: [])
    monkeypatch.setattr(recipe, "recipe_for", lambda found: object())
    monkeypatch.setattr(build, "install", install)
    result = CliRunner().invoke(main, ["install-horovod"])
    assert (result.exit_code, ended) == (129, ["the build"])


def test_a_child_that_is_no_command_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as Python's own resource tracker, which ignores SIGTERM."""
    all_of_them = timed_command._children
    with subprocess.Popen(["sleep", "60"]) as child:
        # Another test may have left a process behind, such as wandb's service, which leads a session.
        monkeypatch.setattr(
            timed_command, "_children", lambda: [pid for pid in all_of_them() if pid == child.pid]
        )
        begin = time.monotonic()
        end_all()
        assert time.monotonic() - begin < 3, "it waits 6 s for a command"
        assert child.poll() is None
        child.kill()
