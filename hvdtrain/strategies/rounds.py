"""Rounds: ranks that train alone for some steps and then make their weights one again (`Trainer(sync=...)`).

A step runs as on one worker, on the rank's share of the batch, without a collective. What differs between ranks in
a round are the weights, the optimizer's state for them, and, as in every training, seeds, statistics and metrics.
Whatever needs one model ends the round first: the end of an epoch (and so validation, checkpoints after epochs and
the final model), evaluation, prediction, saving and loading.

A rank without an example in a step (a small tail) changes nothing but the count of its optimizer's steps, so that
schedules of the learning rate go on in step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator, LoneRank
from hvdtrain.collectives.compression import bf16_sum, int8_sum
from hvdtrain.collectives.mesh import Position
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.data import Share
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import distribute
from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.keras_internals.optimizers import inner_of, optimizer_slots
from hvdtrain.keras_internals.variables import shared_memory_value, tf_variable
from hvdtrain.strategies.rank_steps import RankSteps
from hvdtrain.strategies.round_plan import DiLoCo, LocalSGD
from hvdtrain.strategies.runner import Runner
from hvdtrain.strategies.strategy import Logs, Steps

Sync: TypeAlias = LocalSGD | DiLoCo


class Rounds:
    """The rounds of one model.

    Args:
        sync: what the ranks do at the end of a round.
        model: built and compiled.
        ranks: that train it.

    Attributes:
        steps: of the round so far; 0: all ranks have the same weights.
    """

    def __init__(self, sync: Sync, model: keras.Model, ranks: Communicator) -> None:
        self._sync = sync
        self._ranks = ranks
        self._weights = [tf_variable(v) for v in model.trainable_variables]
        self._slots = [
            tf_variable(slot)
            for optimizer in optimizers_of(model)
            for _, state in optimizer_slots(optimizer)
            for slot in state
        ]
        self.steps = 0
        self._own = self._all = 0  # Examples of the round.
        is_outer = isinstance(sync, DiLoCo)
        self._begin = [_like(w) for w in self._weights] if is_outer else []
        self._momenta = [_like(w) for w in self._weights] if is_outer else []

    @property
    def left(self) -> int:
        """Steps of the round that are left."""
        return self._sync.every - self.steps

    def begin(self) -> None:
        """Before each step."""
        if not self.steps:
            for begin, weight in zip(self._begin, self._weights, strict=False):
                begin.assign(weight)

    def count(self, shares: Sequence[Share]) -> None:
        """Count steps that were made; a collective if the round is complete."""
        self.steps += len(shares)
        self._own += sum(share.examples for share in shares)
        self._all += sum(share.global_examples for share in shares)
        if not self.left:
            self.end()

    def end(self) -> None:
        """Give all ranks the same weights. A collective, unless they have them."""
        if not self.steps:
            return
        part = self._own / self._all
        if isinstance(self._sync, DiLoCo):
            self._step_outside(self._sync, part)
        else:
            for targets in by_dtype([*self._weights, *self._slots]):
                values = _summed([v.value() for v in targets], part, self._ranks, "float32")
                _assign(targets, values)
        self.steps = self._own = self._all = 0

    def _step_outside(self, sync: DiLoCo, part: float) -> None:
        """Douillard et al. 2023, algorithm 1, line 14, with the change where the paper has its negative."""
        pairs = list(zip(self._weights, self._begin, strict=True))
        changes = [weight.value() - begin.value() for weight, begin in pairs]
        place = {id(v): number for number, v in enumerate(self._weights)}
        for targets in by_dtype(self._weights):
            numbers = [place[id(v)] for v in targets]
            sent = [changes[number] for number in numbers]
            for number, change in zip(
                numbers, _summed(sent, part, self._ranks, sync.exchange), strict=True
            ):
                momentum = self._momenta[number]
                momentum.assign(sync.outer_momentum * momentum + change)
                ahead = sync.outer_learning_rate * (change + sync.outer_momentum * momentum)
                self._weights[number].assign(self._begin[number] + ahead)

    # What a checkpoint must know.

    @property
    def apart(self) -> list[tf.Variable]:
        """The variables that may differ between ranks now."""
        if self.steps:
            return [*self._weights, *self._slots]
        return self._slots if isinstance(self._sync, DiLoCo) else []

    @property
    def shared(self) -> list[tf.Variable]:
        """The variables that are the same on all ranks, beside the model's and its optimizer's."""
        return [*self._begin, *self._momenta]

    def state(self) -> dict[str, Any]:
        """Return what this rank has of its own; what `encoding.encode` takes."""
        values = [shared_memory_value(v) for v in self.apart]
        return {"steps": self.steps, "own": self._own, "all": self._all, "apart": values}

    def give(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned on this rank."""
        self.steps, self._own, self._all = state["steps"], state["own"], state["all"]
        _assign(self.apart, state["apart"])

    def give_others(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Begin a round at the average of what other ranks had; each counts by its examples of theirs."""
        self.steps = max(state["steps"] for state in states)
        if self.steps:
            parts = [state["own"] / state["all"] for state in states]
            values = zip(*(state["apart"] for state in states), strict=True)
            mean = [
                sum(
                    part * np.asarray(one, np.float64)
                    for part, one in zip(parts, each, strict=True)
                )
                for each in values
            ]
            _assign(self.apart, mean)
        self.steps = self._own = self._all = 0


class RoundSteps:
    """Training steps without collectives, in rounds; evaluation and prediction of all ranks together."""

    def __init__(self, steps: RankSteps, rounds: Rounds) -> None:
        self._steps = steps
        self._rounds = rounds

    def train(self, shares: Sequence[Share]) -> Logs:
        """Train on `shares`, one after the other; return this rank's logs so far."""
        logs: Logs = {}
        while shares:
            now, shares = shares[: self._rounds.left], shares[self._rounds.left :]
            self._rounds.begin()
            logs = self._steps.train(now)
            self._rounds.count(now)
        return logs

    def test(self, share: Share) -> Logs:
        """Update the metrics from `share`; return the running logs of this process."""
        self._rounds.end()
        return self._steps.test(share)

    def predict(self, share: Share) -> Any:
        """Return the model's outputs for the examples of `share`."""
        self._rounds.end()
        return self._steps.predict(share)

    def finish(self) -> None:
        """Nothing is in flight: each step returns when it is done."""


class RoundRunner(Runner):
    """The rank trains the model alone, in rounds.

    Args:
        sync: what the ranks do at the end of a round.
        position: of this rank.
    """

    def __init__(self, sync: Sync, position: Position) -> None:
        super().__init__(position)
        self._sync = sync
        self.rounds: Rounds | None = None

    def steps(self, model: keras.Model, data: Any = None) -> Steps:
        here = self.position
        if data is None:
            return super().steps(model)
        _refuse(model, self._sync)
        self.rounds = Rounds(self._sync, model, here.data_set)
        steps = RankSteps(model, here.data_set, here.mesh.data, together=False)
        return RoundSteps(steps, self.rounds)

    def end_round(self) -> None:
        if self.rounds is not None:
            self.rounds.end()


def trained_alone(optimizer: Any, reduction: Reduction) -> Any:
    """Make a plain Keras optimizer one of a rank that trains alone; return it."""
    rank = LoneRank(reduction.process_set.ranks[reduction.process_set.rank()])
    return distribute(optimizer, Reduction(process_set=rank))


def by_dtype(variables: Sequence[tf.Variable]) -> list[list[tf.Variable]]:
    """Return the floating-point ones among `variables`, those of one dtype together."""
    found: dict[str, list[tf.Variable]] = {}
    for variable in variables:
        if variable.dtype.is_floating:
            found.setdefault(variable.dtype.name, []).append(variable)
    return list(found.values())


def _summed(
    values: Sequence[tf.Tensor], part: float, ranks: Communicator, wire: str
) -> list[tf.Tensor]:
    """Return the sums over the ranks of `values`, of one dtype, times each rank's `part`. A collective."""
    dtype = values[0].dtype
    exact = tf.float64 if dtype == tf.float64 else tf.float32
    flat = tf.concat([tf.reshape(tf.cast(value, exact), [-1]) for value in values], axis=0)
    flat *= tf.cast(part, exact)
    name = f"hvdtrain_round_{dtype.name}"
    if wire == "float32":
        total = ranks.allreduce(flat, name)
    else:
        total = (bf16_sum if wire == "bfloat16" else int8_sum)(flat, name, ranks)
    sizes = [math.prod(value.shape) for value in values]
    pairs = zip(tf.split(total, sizes), values, strict=True)
    return [tf.cast(tf.reshape(one, value.shape), dtype) for one, value in pairs]


def _like(variable: tf.Variable) -> tf.Variable:
    return tf.Variable(tf.zeros_like(variable), trainable=False)


def _assign(variables: Sequence[tf.Variable], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))


def _refuse(model: keras.Model, sync: Sync) -> None:
    """Raise UsageError for what cannot be trained in rounds."""
    what = ""
    for optimizer in optimizers_of(model):
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            what = (
                "loss scaling (mixed_float16, on_nan='skip'), on which ranks would decide alone: use "
                "mixed_bfloat16, on_nan='stop' or 'rewind'"
            )
        elif optimizer.gradient_accumulation_steps:
            what = "gradient_accumulation_steps: leave it out, and choose a larger every"
        elif inner_of(optimizer).use_ema and isinstance(sync, DiLoCo):
            what = "use_ema, whose averages would differ between ranks: use hvdtrain.LocalSGD"
    if any(getattr(layer, "hvdtrain_synchronized", False) for layer in model._flatten_layers()):
        what = "SyncBatchNormalization, which needs the other ranks in every step: use BatchNormalization"
    if what:
        raise UsageError(f"sync={sync!r} does not work with {what}")
