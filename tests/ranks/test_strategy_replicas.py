"""Central storage, and the TPU's steps on a stand-in of two logical CPU devices: the same as one process.

EXACT is contract 2's limit: 30 steps, every sixth of which has a single example for two replicas of 8 rows.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from launch import Results, on_ranks

EXACT = 1e-5
MARKS = (pytest.mark.slow, pytest.mark.all_cases)


@functools.cache
def run(strategy: str, cases: str) -> Results:
    env = {"HVDTRAIN_STRATEGY": strategy, "HVDTRAIN_REPLICAS": "2"}
    return on_ranks(cases, np=1, env=env)


@pytest.fixture(params=[pytest.param("central-storage", marks=pytest.mark.slow), "tpu"])
def strategy(request: pytest.FixtureRequest) -> str:
    return request.param


def one(strategy: str, case: str, cases: str = "replicas") -> Any:
    (found,) = run(strategy, cases).of(case)
    return found


complaints = functools.partial(one, cases="replicas_complaints")


def check(found: dict[str, Any], place: str = "") -> None:
    for name, value in found.items():
        if isinstance(value, dict) and name != "histories":
            check(value, f"{place} {name}")
        elif name != "histories":
            assert value <= EXACT, f"{place} {name}: {value}"


SAME = ("case_adam", "case_optimizers", "case_ways_of_running", "case_tails")


@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        # Both strategies run the same code on replicas.
        pytest.param(strategy, case, marks=MARKS[(number + place) % 2])
        for place, strategy in enumerate(("central-storage", "tpu"))
        for number, case in enumerate(SAME)
    ],
)
def test_same_as_one_process(strategy: str, case: str) -> None:
    check(one(strategy, case))


@pytest.mark.slow
def test_a_model_that_was_made_on_another_device() -> None:
    found = one("central-storage", "case_made_elsewhere")
    assert found["devices"] == ["device:CPU:0"]
    assert found["weights"] <= EXACT


def test_a_metric_whose_states_do_not_add_up_is_named(strategy: str) -> None:
    found = complaints(strategy, "case_metrics_that_do_not_add_up")
    assert found["Counting"] == []
    (said,) = found["Largest"]
    assert "does not combine into that of the whole batch" in said


def test_what_parts_do_otherwise_is_said_once(strategy: str) -> None:
    (warning,) = complaints(strategy, "case_parts_that_do_otherwise")
    assert "batch_normalization' normalizes by each replica's part of a batch" in warning
    assert "dropout' draws random numbers for each" in warning
    assert "'centred' differs if it looks at several examples at once" in warning
    assert "the loss 'contrast' differs unless it is a mean of one value" in warning


@pytest.mark.parametrize(
    "case",
    [
        "case_sgd",
        pytest.param("case_losses", marks=pytest.mark.slow),
        pytest.param("case_two_outputs", marks=pytest.mark.slow),
    ],
)
def test_each_loss_and_metric_counts_once(case: str) -> None:
    check(one("tpu", case))


def test_a_step_is_one_program() -> None:
    check(one("tpu", "case_one_program"))


def test_each_replica_computes_its_rows(strategy: str) -> None:
    found = one(strategy, "case_division")
    assert found["workers"] == 2
    devices = ("device:CPU:0", "device:CPU:1")
    assert found["seen"] == [[rows, device] for rows in (1, 8) for device in devices]
    assert found["copies"] == [2 if strategy == "tpu" else 1]
    assert found["copies of metrics"] == [1]
    assert found["first"] == ["device:CPU:0"]
    assert found["replicas agree"] == 0


def test_normalization(strategy: str) -> None:
    found = one(strategy, "case_normalization")
    assert found["synchronized"] <= EXACT
    # Rows 0, 1 on one replica and 2, 3 on the other.
    assert found["4"] == pytest.approx([1.5, 0, 0])
    assert found["4, variance"] == pytest.approx([0.25, 0, 0])
    # The tail's one example is on both.
    assert found["5"] == pytest.approx([1, 2, 3])
    assert found["5, variance"] == pytest.approx([0, 0, 0], abs=1e-6)


def test_seeds(strategy: str) -> None:
    found = one(strategy, "case_seeds")
    # Each of two rows gives a weight whose unit it kept 2 (target 1, output 0), averaged.
    assert found["steps"] == [0, 2, 4]
    before, after = found["seeds"]
    assert before != after


def test_precision() -> None:
    found = one("tpu", "case_precision")
    # 8 and 11 bits: 12 steps at rate 0.05 of gradients of about 1.
    assert found["mixed_bfloat16"]["weights"] <= 12 * 0.05 * 2.0**-8
    assert found["mixed_float16"]["weights"] <= 12 * 0.05 * 2.0**-11
    assert found["mixed_float16"]["optimizer"] == "LossScaleOptimizer"
    for precision, values in found.items():
        assert values["compute"] == precision.removeprefix("mixed_")
        assert values["predictions"] == 81


def test_a_step_that_overflows_in_one_process_is_left_out(strategy: str) -> None:
    assert one(strategy, "case_too_large_for_float16") == {"scale": 0.5, "weight": 0.0}


def test_saved_model(strategy: str) -> None:
    found = one(strategy, "case_saved_model")
    assert found["outputs"] <= EXACT
    assert found["went on"] <= EXACT
    assert found["another Trainer"] == 0
    assert found["iterations"] == [18, 18]
    assert found["rate"] == pytest.approx(0.01)


def test_what_cannot_be_right_is_said(strategy: str) -> None:
    found = complaints(strategy, "case_refusals")
    expected = {
        "whole batch": "is computed from sums over all examples of the batch",
        "devices in use": "call hvdtrain.init() first",
        "Horovod's optimizer": "without DistributedOptimizer",
        "Horovod's layer": "BatchNormalization(synchronized=True)",
        "one device": "needs two devices to compute on, but there is CPU:1.",
        "no device": "there is no device '/device:CPU:7': TensorFlow sees CPU:0, CPU:1.",
    }
    for name, words in expected.items():
        assert words in found[name], name
    if strategy == "tpu":
        assert "run_eagerly=True does not work" in found["eager"]
        assert "pass the Trainer a function" in found["built model"]
        assert "the optimizer was used before" in found["used optimizer"]
    else:
        assert "jit_compile=True does not work" in found["jit"]
