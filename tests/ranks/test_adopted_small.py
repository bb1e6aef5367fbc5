"""`hvdtrain run --adopt`: small scripts with one peculiarity each, on two ranks beside one plain process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch import launch, on_ranks

ROUNDING = 1e-5
"""Relative: what the order of sums makes of a few steps."""


@pytest.mark.slow
def test_small_scripts_are_those_of_one_process(tmp_path: Path) -> None:
    ranks = on_ranks("adopted_small", np=2, env={"FOLDER": str(tmp_path)}).of("case_small")
    for apart in ranks:
        assert {name: far for name, far in apart.items() if not far < ROUNDING} == {}


@pytest.mark.slow
def test_a_process_that_a_script_forks_does_not_wait_for_ever(tmp_path: Path) -> None:
    """TensorFlow's threads, and the other ranks, do not exist in it."""
    ranks = on_ranks("adopted_small", np=2, env={"FOLDER": str(tmp_path)}).of("case_forked")
    assert ranks == [{"fit": 1, "evaluate": 1, "predict": 1}] * 2


@pytest.mark.slow
def test_a_fit_that_keras_refuses_says_nothing_of_the_next(tmp_path: Path) -> None:
    ranks = on_ranks("adopted_small", np=2, env={"FOLDER": str(tmp_path)}).of("case_caught")
    assert ranks == [{"refused": True, "is shared": True}] * 2


LAST = """
import atexit, sys, threading, time
def last(name):
    with open(name, "a") as file:
        file.write("once")
atexit.register(last, "at the end")
threading.Thread(target=lambda: [time.sleep(2), last("of a thread")]).start()
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "sys.exit(3)"])
def test_threads_and_exit_functions_write_in_the_folder_of_their_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """They run when the script has ended; after a failure, only for a second."""
    for name in ("project", "private"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "project")
    Path("script.py").write_text(LAST.format(end=end))
    start = [sys.executable, "-P", "-m", "hvdtrain.worker", "-m", "hvdtrain.adopt"]
    ended = launch([*start, "script.py"], env={"TMPDIR": str(tmp_path / "private")})
    assert ended.returncode == (3 if "3" in end else 0)
    if "3" not in end:
        assert Path("at the end").read_text() == Path("of a thread").read_text() == "once"
    assert not [*(tmp_path / "private").glob("*hvdtrain-adopt*")]
