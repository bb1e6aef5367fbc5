"""Local training in rounds (`Trainer(sync=...)`): ranks take steps independently, then synchronize their weights.

A step runs as on one worker, on the rank's share of the batch, without collectives. During a round, the weights and
the optimizer's slots differ between ranks, as do, in any training, seeds, statistics and metrics. Whatever needs a
single model ends the round first: the end of an epoch (and so validation, checkpoints after epochs and the final
model), evaluation, prediction, saving and loading.

A rank whose share of a step is empty (in a small last batch) changes only its optimizer's step count, so that
learning rate schedules stay aligned over the ranks.
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
from hvdtrain.collectives.packing import as_one, bounded_groups, by_dtype
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.data import Share
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import distribute
from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.keras_internals.optimizers import inner_of, optimizer_slots
from hvdtrain.keras_internals.variables import assign, shared_memory_value, tf_variable
from hvdtrain.strategies.rank_steps import RankSteps
from hvdtrain.strategies.round_plan import DiLoCo, LocalSGD
from hvdtrain.strategies.runner import Runner
from hvdtrain.strategies.strategy import Logs, Steps

Sync: TypeAlias = LocalSGD | DiLoCo

AT_ONCE = 1 << 24
"""Maximum number of elements that are synchronized at once, unless a variable has more: copies take memory."""


class Rounds:
    """The rounds of one model.

    Args:
        sync: Length of a round, and how the ranks synchronize at its end.
        model: Built and compiled model.
        ranks: Ranks that train it.

    Attributes:
        steps: Number of steps trained in this round; at 0, all ranks have the same weights.
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
        # Examples in this round, of this rank and of all ranks.
        self._local_examples = self._global_examples = 0
        is_outer = isinstance(sync, DiLoCo)
        self._begin = [_like(w) for w in self._weights] if is_outer else []
        self._momenta = [_like(w) for w in self._weights] if is_outer else []

    @property
    def steps_left(self) -> int:
        """Number of steps left in this round."""
        return self._sync.every - self.steps

    def begin(self) -> None:
        """Start a round unless one is in progress; called before each step."""
        if not self.steps:
            for begin, weight in zip(self._begin, self._weights, strict=False):
                begin.assign(weight)

    def count(self, shares: Sequence[Share]) -> None:
        """Count the steps trained on `shares`; a collective if they complete the round."""
        self.steps += len(shares)
        self._local_examples += sum(share.examples for share in shares)
        self._global_examples += sum(share.global_examples for share in shares)
        if not self.steps_left:
            self.end()

    def end(self) -> None:
        """End the round: synchronize the weights. A collective, unless no step was trained in this round."""
        if not self.steps:
            return
        part = self._local_examples / self._global_examples
        if isinstance(self._sync, DiLoCo):
            self._outer_step(self._sync, part)
        else:
            for targets in _together([*self._weights, *self._slots]):
                values = [target.value() for target in targets.values()]
                assign(targets.values(), _summed(values, part, self._ranks, "float32"))
        self.steps = self._local_examples = self._global_examples = 0

    def _outer_step(self, sync: DiLoCo, part: float) -> None:
        """Take a step of the outer optimizer.

        Douillard et al. 2023, algorithm 1, line 14, with the change of the weights in place of its negative.
        """
        for weights in _together(self._weights):
            own = [weight.value() - self._begin[n].value() for n, weight in weights.items()]
            changes = _summed(own, part, self._ranks, sync.exchange)
            for (number, weight), change in zip(weights.items(), changes, strict=True):
                momentum = self._momenta[number]
                momentum.assign(sync.outer_momentum * momentum + change)
                ahead = sync.outer_learning_rate * (change + sync.outer_momentum * momentum)
                weight.assign(self._begin[number] + ahead)

    # State for checkpoints.

    @property
    def divergent_variables(self) -> list[tf.Variable]:
        """Variables that may currently differ between ranks."""
        if self.steps:
            return [*self._weights, *self._slots]
        return self._slots if isinstance(self._sync, DiLoCo) else []

    @property
    def replicated_variables(self) -> list[tf.Variable]:
        """Variables that are equal on all ranks, in addition to those of the model and its optimizer."""
        return [*self._begin, *self._momenta]

    def state(self) -> dict[str, Any]:
        """Return this rank's own state, in types that `encoding.encode` accepts."""
        values = [shared_memory_value(v) for v in self.divergent_variables]
        return {
            "steps": self.steps,
            "own": self._local_examples,
            "all": self._global_examples,
            "apart": values,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned on this rank."""
        self.steps = state["steps"]
        self._local_examples, self._global_examples = state["own"], state["all"]
        assign(self.divergent_variables, state["apart"])

    def restore_average(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Start a new round from the average of other ranks' states, weighted by their examples in the round."""
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
            assign(self.divergent_variables, mean)
        self.steps = self._local_examples = self._global_examples = 0


class RoundSteps(Steps):
    """Trains without collectives, in rounds; evaluates and predicts on all ranks together."""

    def __init__(self, steps: RankSteps, rounds: Rounds) -> None:
        self._steps = steps
        self._rounds = rounds

    def train(self, shares: Sequence[Share]) -> Logs:
        """Train on `shares`, one after the other; return this rank's logs so far."""
        logs: Logs = {}
        while shares:
            now, shares = shares[: self._rounds.steps_left], shares[self._rounds.steps_left :]
            self._rounds.begin()
            logs = self._steps.train(now)
            self._rounds.count(now)
        return logs

    def test(self, share: Share) -> Logs:
        """End the round, and update the metrics from `share`; return this rank's running logs."""
        self._rounds.end()
        return self._steps.test(share)

    def probe_test(self, share: Share) -> None:
        """End the round, and test how losses of evaluations depend on the batch; see RankSteps. A collective."""
        self._rounds.end()
        self._steps.probe_test(share)

    def predict(self, share: Share) -> Any:
        """End the round, and return the model's outputs for the examples of `share`."""
        self._rounds.end()
        return self._steps.predict(share)


class RoundRunner(Runner):
    """Runner for which each rank trains the model independently, in rounds.

    Args:
        sync: Length of a round, and how the ranks synchronize at its end.
        position: Position of this rank in the mesh.

    Attributes:
        rounds: Rounds of the model; None before training steps are made.
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
        steps = RankSteps(model, here.data_set, False, here.tensor_set.ranks)
        return RoundSteps(steps, self.rounds)

    def end_round(self) -> None:
        if self.rounds is not None:
            self.rounds.end()


def trained_alone(optimizer: Any, reduction: Reduction) -> Any:
    """Make a plain Keras optimizer a distributed one that reduces over this rank only; return it.

    Raises:
        UsageError: See `hvdtrain.keras.optimizer.require_plain`.
        EngineError: See `hvdtrain.keras.optimizer.require_plain`.
    """
    rank = LoneRank(reduction.process_set.ranks[reduction.process_set.rank()])
    return distribute(optimizer, Reduction(process_set=rank))


def _together(variables: Sequence[tf.Variable]) -> list[dict[int, tf.Variable]]:
    """Return the floating-point variables by their places, those together that are synchronized at once."""
    return [
        {place: variables[place] for place in places}
        for alike in by_dtype(variables)
        if variables[alike[0]].dtype.is_floating
        for places in bounded_groups(alike, lambda p: math.prod(variables[p].shape), AT_ONCE)
    ]


def _summed(
    values: Sequence[tf.Tensor], part: float, ranks: Communicator, wire: str
) -> list[tf.Tensor]:
    """Return `values` (all of one dtype), weighted by each rank's `part` and summed over the ranks. A collective."""
    dtype = values[0].dtype
    exact = tf.float64 if dtype == tf.float64 else tf.float32
    name = f"hvdtrain_round_{dtype.name}"

    def total(flat: tf.Tensor) -> tf.Tensor:
        if wire == "float32":
            return ranks.allreduce(flat, name)
        return (bf16_sum if wire == "bfloat16" else int8_sum)(flat, name, ranks)

    weighted = [tf.cast(value, exact) * tf.cast(part, exact) for value in values]
    return [tf.cast(value, dtype) for value in as_one(weighted, total)]


def _like(variable: tf.Variable) -> tf.Variable:
    return tf.Variable(tf.zeros_like(variable), trainable=False)


def _refuse(model: keras.Model, sync: Sync) -> None:
    """Raise UsageError if `model` cannot be trained in rounds."""
    what = ""
    for optimizer in optimizers_of(model):
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            what = (
                "loss scaling (mixed_float16, on_nan='skip'), which ranks would decide independently: use "
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
