"""`hvdtrain top`: the view of a run from its folder, while it goes on and after it has ended."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from glass import Glass
from test_live_view import events

from hvdtrain.cli.top import top
from hvdtrain.errors import UsageError

ROOT = Path(__file__).parents[2]


def write(folder: Path, epochs: int = 2, **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({**one, "time": one["time"] + 1e9}) for one in events(epochs, **more)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")


def once(folder: Path) -> list[str]:
    return (
        CliRunner().invoke(top, [str(folder), "--once"], catch_exceptions=False).output.splitlines()
    )


def test_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run-1", warning={"text": "slow\n disk"})
    monkeypatch.setattr(time, "time", lambda: 1e9 + 30)
    head, first, *_, last = once(tmp_path / "run-1")
    assert head == "run-1: running"
    assert first.startswith("Epoch 2/4 ━")
    assert first.endswith("─  37%  0:25 left")
    assert last == "warning: slow disk"


def test_a_run_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run-1")
    monkeypatch.setattr(time, "time", lambda: 1e9 + 115)
    assert once(tmp_path / "run-1")[0] == "run-1: no activity for 1 min 40 s (killed?)"


def test_a_run_that_failed(tmp_path: Path) -> None:
    write(tmp_path / "run-1", end={"how": "DivergedError: the loss is nan"})
    head, first, *_ = once(tmp_path / "run-1")
    assert head == "run-1: DivergedError: the loss is nan"
    assert first.endswith("─  37%"), "no time is left"


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no run"):
        once(tmp_path)


def test_on_a_terminal_it_stays_until_the_run_ends(tmp_path: Path) -> None:
    write(tmp_path / "run-1")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "hvdtrain.cli", "top", str(tmp_path / "run-1")],
        cwd=ROOT, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 65536)
    write(tmp_path / "run-1", epochs=4, end={"how": "finished"})
    _, imported = process.communicate(timeout=60)
    with pytest.raises(OSError):  # The terminal has no more.
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    rows = Glass().write(shown.decode().replace("\r\n", "\n")).rows
    assert process.returncode == 0
    assert rows[0] == "run-1: finished"
    assert [row.split()[0] for row in rows[1:5]] == ["Epoch", "step", "loss", "accuracy"]
    assert rows[-1] == ""
    modules = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert modules.isdisjoint({"tensorflow", "keras", "horovod", "numpy"})
