"""A fit that goes on as it was arranged equals the undisturbed one to the bit, whatever it is made of."""

from __future__ import annotations

import os

import pytest
from launch import on_ranks

EVERY = 1 if "HVDTRAIN_ALL_CASES" in os.environ else 8
"""All of them before a release."""


@pytest.mark.slow
def test_each_pair() -> None:
    env = {"RESUMED_EVERY": str(EVERY)}
    for found in on_ranks("resumed_pairs", np=2, env=env, timeout=1800).of("case_rows"):
        assert len(found) == -(-25 // EVERY)
        assert {name: far for name, far in found.items() if far} == {}
