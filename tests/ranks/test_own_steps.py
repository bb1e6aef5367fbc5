"""A train_step that uses what it has updated: compiled by XLA, on ranks, it trains as in one process without."""

from __future__ import annotations

import pytest
from launch import on_ranks

EXACT = 2e-6
"""The order of float32 sums over 6 steps of Adam."""


@pytest.mark.slow
def test_equals_one_process() -> None:
    for found in on_ranks("own_steps", np=2).of("case_jit"):
        far = {(k, way): v for k, both in found.items() for way, v in both.items()}
        assert {key: value for key, value in far.items() if not value <= EXACT} == {}
