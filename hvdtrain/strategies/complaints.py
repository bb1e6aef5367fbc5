"""What RankSteps says of a model whose step on parts of a batch does not add up to the step of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from hvdtrain.strategies.probe import Verdict


def kept_apart(names: Sequence[str]) -> str | None:
    """Return a warning of variables that each worker keeps for itself; None without `names`."""
    if not names:
        return None
    return (
        f"A step updates the tf.Variable {names[0]!r} by something other than a sum or mean over the "
        "examples of its batch. Each worker uses its own part of the batch and keeps its own value: "
        "create it with self.add_weight(trainable=False), and the values are averaged at the end of "
        "each epoch"
    )


def averages(names: Sequence[str]) -> str | None:
    """Return a warning of variables that are averaged after an epoch; None without `names`."""
    if not names:
        return None
    others = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
    return (
        f"A step updates {names[0]!r}{others} by something other than a sum or mean over the "
        "examples of its batch. Each worker uses its own part of the batch, and the values are "
        "averaged at the end of each epoch: where training depends on them, it differs from "
        "training on one worker"
    )


def no_mean(metric: str) -> str:
    """Return a warning of a metric that gets a number of the batch which is no mean over its examples."""
    return (
        f"The metric {metric!r} gets one number for a batch, which is not a mean over its examples, "
        "and each worker has only a part of the batch: it depends on the number of workers. "
        "Training is not affected. Update it with one value per example, or with sums over "
        "examples that result() combines"
    )


def loss_of_parts(model: keras.Model) -> str:
    """Return a warning of a loss in evaluations that does not combine."""
    return (
        f"In an evaluation, the loss of {type(model).__name__} depends on the number of workers: each "
        "has only a part of a batch, and the losses of the parts do not combine into that of the "
        "batch. Let the loss be a mean of one value per example"
    )


def predicts_together(model: keras.Model) -> str:
    """Return a warning of predictions that depend on the other examples of a batch."""
    return (
        f"In a prediction, what {type(model).__name__} returns for an example depends on the other "
        "examples of its batch, of which each worker has only a part: it depends on the number of "
        "workers. Compute it after predict, from the outputs of all examples"
    )


def assigned(model: keras.Model, name: str) -> str:
    """Return the error of a step that assigns to the weight `name` directly."""
    return (
        f"The train_step of {type(model).__name__} assigns to the weight {name!r} directly, by "
        "something other than a sum or mean over the examples of its batch, of which each worker "
        "has only a part: let it pass the gradients to self.optimizer.apply(gradients, "
        "self.trainable_variables)"
    )


def could_not_be_tried(model: keras.Model, why: str) -> str:
    """Return a warning of a step that could not be tested."""
    return (
        f"The training step of {type(model).__name__} could not be tested on parts of a batch: "
        f"{why}. Several workers train like one only if its loss is a mean of one value per "
        "example, and it draws no random numbers (each worker draws its own)"
    )


def cannot_be_traced(model: keras.Model, why: str) -> str:
    """Return a warning of an eager step in which decisions cannot be looked for."""
    return (
        f"The training step of {type(model).__name__} runs eagerly and cannot be traced ({why}), "
        "so it is unknown whether it branches on values of a worker's own part of the batch: if "
        "it does, each worker branches independently, so the result depends on the number of "
        "workers"
    )


def does_not_add_up(model: keras.Model, found: Sequence[Verdict]) -> str:
    """Return the error of a step whose gradients do not add up; `found`: the verdicts of all ranks."""
    worst = max(found, key=lambda each: each.gap)
    gap = f"{worst.gap:.0%}" if worst.gap >= 0.01 else f"{worst.gap:.1%}"
    where = ", once labels or padding vary," if worst.varied else ""
    begin = (
        f"The gradients of the parts of a batch do not add up{where} to those of the batch: that of "
        f"{worst.worst!r} differs by {gap}, and each worker has only a part of the "
        "batch. "
    )
    if all(each.as_sum for each in found):
        return begin + (
            f"The train_step of {type(model).__name__} sums over the examples: let it take the "
            "mean instead, so that the result does not depend on how many a worker has"
        )
    return begin + (
        "The loss, or a layer, looks at several examples at once, or divides by something other "
        "than their number: make the loss a mean of one value per example, gather the outputs of "
        "all workers in it (docs/exactness.md), or train on one worker. With "
        "Trainer(probe=False) each worker uses its own part, and the result depends "
        "on the number of workers"
    )
