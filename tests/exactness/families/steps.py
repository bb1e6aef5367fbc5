"""Training steps that users write."""

from __future__ import annotations

from exactness.case import EVEN, Case

GROUP = "training steps of your own"


def _step(name: str, model: str, **kwargs: object) -> Case:
    return Case(GROUP, name, model=model, **kwargs)  # type: ignore[arg-type]


HAND = {"loss": "", "metrics": ""}
EAGER = {"run_eagerly": "True"}
CASES = (
    _step("Keras's guide: compute_loss, apply_gradients, metrics", "Guide"),
    _step("the same, jit_compile=True", "Guide", compiled={"jit_compile": "True"}),
    _step("the same, run_eagerly=True", "Guide", compiled=EAGER),
    _step("the same, steps_per_execution=2", "Guide", compiled={"steps_per_execution": "2"}),
    _step("the same, validation by Keras's test_step", "Guide", fit={"validation_data": "True"}),
    _step("a test_step, too", "OwnTest", fit={"validation_data": "True"}, answers=True),
    _step("the mean, by hand", "ByHand", **HAND),
    _step("the sum, by hand", "SumByHand", **HAND),
    _step("the sum by the batch's size", "SumByBatchSize", **HAND),
    _step("the sum by the global batch size", "SumByFixedSize", **HAND),
    _step("a value for each example, by hand", "VectorByHand", **HAND),
    _step("the root of the mean, by hand", "RootByHand", **HAND),
    _step("gradients halved", "ScaledByHand", **HAND),
    _step("a decay of the weights added to the gradients", "DecayedByHand", **HAND),
    _step("gradients clipped by their norm", "ClippedByHand", **HAND),
    _step("gradients by their norm", "NormalizedByHand", **HAND),
    _step("signs of the gradients", "SignsByHand", **HAND),
    _step("no optimizer: assign_sub", "AssignedByHand", **HAND),
    _step("steps with a large loss are left out", "SkippedByHand", **HAND),
    _step("steps with a large loss are left out, run_eagerly=True", "SkippedByHand", **HAND, compiled=EAGER),
    _step("steps with a large loss are left out, in Python", "SkippedInPython", **HAND, compiled=EAGER),
    _step("random numbers in the step", "NoisyByHand", **HAND),
    _step("two updates in a step", "TwoUpdates"),
    _step("two updates in a step, jit_compile=True", "TwoUpdates", compiled={"jit_compile": "True"}),
    _step("two optimizers", "TwoOptimizers", **HAND),
    _step("two optimizers, accumulation in one", "TwoOptimizers", **HAND,
          optimizer="SGD(0.1, gradient_accumulation_steps=2)"),
    _step("a moving average after the update", "Follower"),
    _step("a moving average after the update, jit_compile=True", "Follower", compiled={"jit_compile": "True"}),
    _step("weights moved and put back (sharpness-aware)", "Ahead"),
    _step("a gradient within the loss (WGAN-GP)", "InputPenalty"),
    _step("logs: the learning rate", "LogsRate"),
    _step("logs: the mean of a batch", "LogsMean"),
    _step("logs: the mean of a batch, full batches", "LogsMean", examples=EVEN),
    _step("logs: the largest of a batch", "LogsLargest"),
    _step("logs: the norm of the weights", "LogsNorm"),
    _step("logs: a result times 100", "LogsScaled"),
    _step("compute_metrics with one more", "AddsMetric"),
)  # fmt: skip
