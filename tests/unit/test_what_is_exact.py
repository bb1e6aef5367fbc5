"""The table of what is exact (tests/exactness): what is in it, how it judges, and its page."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
from exactness.case import Case
from exactness.families import CASES
from exactness.page import read_page
from exactness.verdict import BROKEN, EQUAL, REFUSED, SILENT, TOLERANCE, WARNED, judge

CASE = Case("group", "name")
WRITTEN = " ".join(
    " ".join([*c.layers, c.loss, c.optimizer, c.metrics, *c.compiled.values(), *c.fit.values()])
    for c in CASES
)
NOT_TRAINED = {
    "losses": {"Loss"},
    "metrics": {"Metric", "Mean", "Sum"},
    # MultiOptimizer and OptimizerMap hold others, as a model with two does.
    "optimizers": {"Optimizer", "MultiOptimizer", "OptimizerMap"},
}


@pytest.mark.parametrize("family", NOT_TRAINED)
def test_every_one_of_keras_has_a_case(family: str) -> None:
    names = {n for n in dir(getattr(keras, family)) if n[0].isupper()} - NOT_TRAINED[family]
    assert {name for name in names if not re.search(rf"\b{name}\(", WRITTEN)} == set()


def test_names_are_unique() -> None:
    assert [name for name, times in Counter(map(str, CASES)).items() if times > 1] == []


def test_page_is_about_the_cases_and_has_no_fault() -> None:
    page = read_page()
    # A new case's row comes with `python tests/exactness/table.py --write -k ITS NAME`.
    assert list(page) == [str(case) for case in CASES]
    assert {word for row in page.values() for word in row.words} == {EQUAL, WARNED, REFUSED}


def found(weights: float = 0.0, loss: float = 0.0, told: tuple[str, ...] = ()) -> dict[str, Any]:
    history = {"loss": [loss], "worst": [loss]}
    return {"weights": [np.full(3, weights)], "history": history, "warnings": list(told)}


@pytest.mark.parametrize(
    ("ranks", "word"),
    [
        ([found(0.9 * TOLERANCE), found()], EQUAL),
        ([found(), found(2 * TOLERANCE)], SILENT),
        ([found(np.nan), found()], SILENT),
        ([found(1.0, told=("The loss is taken for a mean",)), found()], WARNED),
        ([found(1.0, told=("The metric 'worst' differs",)), found()], SILENT),
        ([found(loss=1.0, told=("The metric 'worst' differs",)), found()], SILENT),
        ([{"refused": "why"}, {"refused": "why"}], REFUSED),
        ([{"refused": "why"}, found()], BROKEN),
    ],
)
def test_verdict(ranks: list[dict[str, Any]], word: str) -> None:
    assert judge(CASE, found(), ranks).word == word


def test_what_plain_keras_says_too_is_no_warning_of_ours() -> None:
    assert judge(CASE, found(told=("hot",)), [found(1.0, told=("hot",))]).word == SILENT


def test_equal_nans_are_equal() -> None:
    assert judge(CASE, found(np.nan), [found(np.nan)]).word == EQUAL
