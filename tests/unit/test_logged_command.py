"""Long commands: the progress bar, the log, the ends."""

import sys
import time
from pathlib import Path

import pytest
from click._termui_impl import ProgressBar

from hvdtrain.install import logged_command


def test_output_goes_to_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "log"
    for word in ("one", "two"):
        logged_command.run([sys.executable, "-c", f"print('{word}')"], label="Saying", log=log)
    assert "one\n" in log.read_text() and "two\n" in log.read_text()
    assert capsys.readouterr().out == "Saying\n" * 2


def test_the_bar_follows_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(ProgressBar, "update", lambda bar, n: steps.append(n) or bar.make_step(n))
    said = "print('[  1%] Building a', '[ 67%] Built b', '[ 50%] Building c', sep='\\n')"
    logged_command.run([sys.executable, "-c", said], label="Building", log=tmp_path / "log")
    assert steps == [1, 66, 0, 33]


def test_failure_shows_the_first_errors_and_the_end(tmp_path: Path) -> None:
    script = """
print("a.cc:1: error: no such type")
for number in range(100): print("line", number)
raise SystemExit(3)
"""
    with pytest.raises(logged_command.CommandFailed) as caught:
        logged_command.run([sys.executable, "-c", script], label="Building", log=tmp_path / "log")
    message = str(caught.value)
    assert message.startswith("Building: failed with exit code 3.")
    assert "no such type" in message and "line 99" in message and "line 50" not in message
    assert str(tmp_path / "log") in message


def test_an_interrupt_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
print("[ 10%]", flush=True)
time.sleep(600)
"""

    def interrupt(bar: object, steps: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        logged_command.run([sys.executable, "-c", script], label="Hanging", log=tmp_path / "log")
    child = int((tmp_path / "log").read_text().splitlines()[-2])
    # It was sent a signal; the kernel may need a moment.
    deadline = time.monotonic() + 20
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
