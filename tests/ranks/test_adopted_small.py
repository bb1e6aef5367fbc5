"""`hvdtrain run --adopt`: small scripts with one peculiarity each, on two ranks beside one plain process."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import on_ranks

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
