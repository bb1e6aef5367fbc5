"""What docs/what-is-exact.md says is so: a sample of its rows, and cases that nobody wrote."""

from __future__ import annotations

import os

import pytest
from exactness.case import Case
from exactness.families import CASES
from exactness.grammar import cases
from exactness.page import read_page
from exactness.table import reference, verdict, verdicts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ALL_CASES = "HVDTRAIN_ALL_CASES" in os.environ
SAMPLE = (
    "losses: several outputs: sample weights of each output",
    "losses of your own: the mean over the batch, sample weights",
    "losses of your own: contrastive, one example for each of three workers",
    "losses of your own: compute_loss: a value for each example",
    "metrics of your own: the root of the mean",
    "metrics of your own: result is a dict",
    "training steps of your own: steps with a large loss are left out, run_eagerly=True",
    "layers that look at the batch: SyncBatchNormalization()",
    "layers that look at the batch: BatchNormalization()",
)


def check(name: str, case: Case, size: int) -> None:
    found = verdict(case, size, reference(case))
    assert found.word == read_page()[name].words[size - 1], found


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name: str) -> None:
    check(name, next(case for case in CASES if str(case) == name), 2)


@pytest.mark.slow
def test_rows_of_the_table() -> None:
    page = read_page()
    every = 1 if ALL_CASES else 60
    found = {str(case): each for case, (each,) in verdicts(CASES[::every], [2])}
    assert {n: v for n, v in found.items() if v.word != page[n].words[1]} == {}


@pytest.mark.slow
@given(cases(), st.integers(1, 3))
@settings(
    max_examples=15 if ALL_CASES else 5,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_any_case(case: Case, size: int) -> None:
    found = verdict(case, size, reference(case))
    assert not found.is_fault, found
