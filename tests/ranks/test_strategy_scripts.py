"""The scripts under central storage and on the stand-in for a TPU; and what is said where there is neither."""

from __future__ import annotations

import sys
import time

import pytest
from launch import ROOT, Results, on_ranks, run_command


@pytest.fixture(scope="module")
def results() -> Results:
    env = {"HVDTRAIN_STRATEGY": "central-storage", "HVDTRAIN_REPLICAS": "2"}
    return on_ranks("replica_scripts", np=1, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["central-storage", "tpu"])
@pytest.mark.parametrize(
    "case", [pytest.param("case_mnist", marks=pytest.mark.slow), "case_tabular"]
)
def test_a_script_unchanged_ends_with_the_weights_of_one_process(
    results: Results, case: str, strategy: str
) -> None:
    (found,) = results.of(case)
    assert found[strategy]["weights"] <= 1e-5
    assert found[strategy]["accuracy"] <= 0.002
    assert found["accuracy"] >= 0.7


@pytest.mark.slow
def test_the_script_for_tpus(results: Results) -> None:
    (found,) = results.of("case_tpu")
    assert found["accuracy"] >= 0.5
    assert found["loaded"] == 0
    assert found["compute"] == "bfloat16"
    assert found["copies"] == 2
    assert found["epochs"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "environment", "message"),
    [
        ("train_tpu.py", {"TPU_NAME": ""}, "strategy tpu: this machine has no TPU"),
        (
            "train_mnist.py",
            {"HVDTRAIN_STRATEGY": "central-storage"},
            "strategy central-storage needs two devices to compute on, but there is CPU:0",
        ),
    ],
)
def test_without_what_it_needs(script: str, environment: dict[str, str], message: str) -> None:
    start = time.monotonic()
    done = run_command([sys.executable, str(ROOT / "scripts" / script)], env=environment)
    assert time.monotonic() - start < 60
    assert done.returncode == 2, done.output
    assert message in done.output
    assert done.output.count("Error:") == 1
    assert "Traceback" not in done.output
