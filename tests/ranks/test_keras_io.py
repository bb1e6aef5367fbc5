"""Models of the kinds on keras.io train on several workers to the weights that plain Keras finds in one process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from launch import Results, on_ranks

NAMES = (
    "convnet",
    "vision transformer",
    "u-net",
    "denoising autoencoder",
    "captcha by ctc",
    "bidirectional lstm",
    "transformer classifier",
    "miniature gpt",
    "masked language model",
    "translation",
    "variational autoencoder",
    "gan",
    "wgan-gp",
    "diffusion",
    "wide and deep",
    "gated residual network",
    "recommender",
    "forecast",
    "siamese network",
    "simsiam",
    "distiller",
    "step of the guide",
    "endpoint layer",
    "mean teacher",
)
pytestmark = pytest.mark.slow
BY_TRAINER_ALONE = {
    "translation": "its loss divides by the words that are no padding, of all ranks"
}
ALL_CASES = "HVDTRAIN_ALL_CASES" in os.environ
EVERY = 1 if ALL_CASES else 6
TRIED = NAMES[::EVERY]
ENVIRONMENT = {"KERAS_IO_EVERY": str(EVERY)}
EXACT = 2e-5
"""Four steps in float32, whose sums are made in another order; weights are around 1, rates up to 0.5."""


@pytest.fixture(scope="module")
def one() -> Results:
    return on_ranks("keras_io", np=1, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def two() -> Results:
    return on_ranks("keras_io", np=2, env=ENVIRONMENT, timeout=900)


def check(found: Any, wanted: Any) -> None:
    assert not isinstance(wanted, str), wanted
    assert not isinstance(found, str), found
    np.testing.assert_allclose(found, wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", TRIED)
def test_trainer(name: str, one: Results, two: Results) -> None:
    (wanted,) = one.of("case_plain")
    assert not isinstance(wanted[name], str), wanted[name]
    alone = one.of("case_trainer") if ALL_CASES else []
    for found in (*alone, *two.of("case_trainer")):
        check(found[name], wanted[name]["all"])


@pytest.mark.parametrize("name", TRIED)
def test_drop_in(name: str, one: Results, two: Results) -> None:
    (wanted,) = one.of("case_plain")
    first, second = two.of("case_drop_in")
    check(second[name], first[name])
    if name not in BY_TRAINER_ALONE:
        check(first[name], wanted[name]["even"])


def test_every_model_has_its_test(one: Results) -> None:
    (found,) = one.of("case_plain")
    assert list(found) == list(TRIED)


def test_states_of_rows_and_callbacks_of_evaluate(one: Results, two: Results) -> None:
    (wanted,) = one.of("case_stateful")
    for found in two.of("case_stateful"):
        check(found["weights"], wanted["weights"])
        check(found["losses"], wanted["losses"])
