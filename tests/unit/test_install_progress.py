"""Long commands: the moving line, the log, the ends."""

import io
import os
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.install import progress


def test_percent_of_make() -> None:
    assert progress.last_percent(b"[  1%] Building a\n  [ 67%] Built b\nnoise [x]") == 67
    assert progress.last_percent(b"nothing") is None


def test_elapsed() -> None:
    assert [progress.elapsed(seconds) for seconds in (0.4, 59.9, 72)] == ["0s", "59s", "1m12s"]


def test_line_moves_on_a_terminal_and_not_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        line = progress.ProgressLine("Building", stream)
        line.update(45)
        line.finish("done")
    assert "\rclear".replace("clear", "\033[K") + "Building  45 %  0s" in terminal.getvalue()
    assert file.getvalue() == "Building: done (0s)\n"


def test_output_is_returned_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "log"
    for word in ("one", "two"):
        printed = progress.run(
            [sys.executable, "-c", f"print('{word}')"],
            label="Saying",
            log=log,
            environment=os.environ,
        )
        assert printed == f"{word}\n"
    assert "one\n" in log.read_text() and "two\n" in log.read_text()
    assert capsys.readouterr().out == "Saying: done (0s)\n" * 2


def test_failure_shows_the_first_errors_and_the_end(tmp_path: Path) -> None:
    script = """
print("a.cc:1: error: no such type")
for number in range(100): print("line", number)
raise SystemExit(3)
"""
    with pytest.raises(progress.CommandFailed) as caught:
        progress.run(
            [sys.executable, "-c", script],
            label="Building",
            log=tmp_path / "log",
            environment=os.environ,
        )
    message = str(caught.value)
    assert message.startswith("Building: failed with exit code 3.")
    assert "no such type" in message and "line 99" in message and "line 50" not in message
    assert str(tmp_path / "log") in message


def test_timeout_leaves_no_process(tmp_path: Path) -> None:
    script = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
    with pytest.raises(progress.CommandFailed, match="timed out"):
        progress.run(
            [sys.executable, "-c", script],
            label="Hanging",
            log=tmp_path / "log",
            environment=os.environ,
            timeout=3,
        )
    child = int((tmp_path / "log").read_text().splitlines()[-1])
    # It was sent SIGKILL; the kernel may need a moment.
    deadline = time.monotonic() + 20
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
