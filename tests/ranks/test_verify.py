"""`hvdtrain verify` finds two workers the same as one if they are, and says what parts them if they are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launch import on_ranks

from hvdtrain.verify.comparison import compare
from hvdtrain.verify.likely_causes import likely_causes
from hvdtrain.verify.recording import Recording, read_recording

pytestmark = pytest.mark.slow
STEPS = 3
SAME = ("dense", "tail", "convolutional", "zero", "tensor", "steps per execution", "dataset")
LOOPS = ("model.fit", "own loop", "own eager loop")
DIFFERENT = {
    "BatchNormalization": "which normalizes by a worker's share of the batch",
    "scaled rate": "The learning rate is 0.01 on one worker and 0.02 on several",
    "rate of a callback": "The learning rate is 0.01 on one worker and 0.02 on several",
    "batch of the workers": "A step has 4 examples on one worker and 8 on several",
    "data of the workers": "Together, the workers read different examples",
    "rounds": "sync=LocalSGD",
    "model.fit with a scaled rate": "The learning rate is 0.01 on one worker and 0.02 on several",
    "own loop without a reduction": "the gradients are not averaged",
    "own loop without a broadcast": "The workers start with different values",
    "own loop that adds up": "The gradient is 2 times that on one worker",
    "own loop that clips on each worker": "gradients are clipped after they are averaged",
    "own loop with unequal shares": "each worker needs an equal share of the batch",
    "own loop with dropout": "which draws different random numbers on each worker",
    "model.fit with the rate of one worker": "The workers have different learning rates",
    "model.fit with BatchNormalization": "which normalizes by a worker's share of the batch",
    "model.fit with a momentum of the workers": "momentum of the optimizer is 0.9 on one worker and 0.45",
    "schedule of the workers": "decay_steps of the optimizer is 100 on one worker and 50",
    "units of the workers": "units of layer 'dense' is 4 on one worker and 8 on several",
    "order of the workers": "the same examples in a different order",
    "file of all workers": "Several workers write",
    "loss over the workers": "The loss is 0.5 times that on one worker",
    "weights of the workers": "value of layer 'dense' is 0.1 on one worker and 0.2",
}
UNCLEAR = {
    "dropout": "which draws different random numbers on each worker",
    "data without a seed": "Two runs on one worker read different examples",
    "noise": "it draws no random numbers (each worker draws its own)",
}
CHOSEN = [*SAME, *LOOPS, *DIFFERENT, *UNCLEAR][:: 1 if "HVDTRAIN_ALL_CASES" in os.environ else 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("verify")
    for np in (1, 2):
        env = {"FOLDER": str(found), "NAMES": ";".join(CHOSEN)}
        on_ranks("verify", np=np, env=env).of("case_record")
    return found


def recordings(folder: Path, name: str) -> tuple[Recording, Recording, Recording]:
    one, reordered, several = (
        read_recording(folder / place / name)
        for place in ("1/forwards", "1/backwards", "2/forwards")
    )
    return one, reordered, several


@pytest.mark.parametrize("name", [name for name in SAME if name in CHOSEN])
def test_the_same(name: str, folder: Path) -> None:
    one, reordered, several = recordings(folder, name)
    steps = compare(one, reordered, several)
    assert [step.outcome for step in steps] == ["same"] * len(steps)
    assert steps[-1].step >= STEPS
    assert all(step.of in (8, 5, 16) for step in steps[1:])
    assert one.steps[1].logs["loss"] > 0
    # Another order of sums is seen, or nothing was compared.
    assert 0 < max(step.reordered for step in steps) < 1e-4


@pytest.mark.parametrize("name", [name for name in LOOPS if name in CHOSEN])
def test_the_same_without_a_trainer(name: str, folder: Path) -> None:
    """Their batches are not known, and are not turned round."""
    steps = compare(*recordings(folder, name))
    assert [(step.step, step.outcome) for step in steps] == [(n, "same") for n in range(STEPS + 1)]
    assert 0 < steps[-1].whole < 1e-6 and 0 < steps[-1].reordered < 1e-5
    assert {step.of for step in steps} == {0}


@pytest.mark.parametrize(
    ("name", "cause"),
    [pair for pair in (DIFFERENT | UNCLEAR).items() if pair[0] in CHOSEN],
)
def test_another(name: str, cause: str, folder: Path) -> None:
    three = recordings(folder, name)
    bad = next(step for step in compare(*three) if step.outcome != "same")
    assert bad.outcome == ("unclear" if name in UNCLEAR else "different")
    assert cause in " ".join(likely_causes(*three, bad))
