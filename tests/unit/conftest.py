"""Unit tests share one process: what one file makes of it, the next file must not see."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def own_environment() -> Iterator[None]:
    """A rank's start sets variables (`hvdtrain.init`); they end with the file."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def signals_count() -> Iterator[None]:
    """Whoever started the tests may have told them to ignore these, as nohup and `script &` do; commands would too."""
    defaults = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs that play Slurm; nothing else of Slurm is in PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr("hvdtrain.launch.slurm.job_queue.POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path
