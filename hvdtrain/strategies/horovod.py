"""HorovodStrategy: synchronous data parallel training, one process a worker. The default."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import keras

from hvdtrain.collectives.accumulated import as_one_process, restored_by_first, share_out
from hvdtrain.collectives.agreement import on_first, require_equal
from hvdtrain.collectives.communicator import ALL_RANKS, Average, Communicator
from hvdtrain.collectives.metrics import state_variables
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.collectives.replicas import broadcast_variables, check_replicas
from hvdtrain.collectives.statistics import average_statistics, fold_rank_into_seeds
from hvdtrain.data import Part, Share
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import distribute, reducer_of
from hvdtrain.keras_internals.building import build_model, symbolic_call
from hvdtrain.keras_internals.models import metric_names, optimizers_of
from hvdtrain.keras_internals.optimizer_state import share_loaded
from hvdtrain.keras_internals.optimizers import accumulators, inner_of, is_distributed
from hvdtrain.keras_internals.variables import (
    local_variables,
    row_states,
    seed_variables,
    tf_variable,
    trained_variables,
)
from hvdtrain.runtime import Rank
from hvdtrain.strategies.gather import gather_predictions
from hvdtrain.strategies.model_file import read_model, write_model
from hvdtrain.strategies.step_metrics import merged_logs
from hvdtrain.strategies.steps import RankSteps
from hvdtrain.strategies.strategy import Logs, Steps, Strategy


class HorovodStrategy(Strategy):
    """Each rank computes its share of the global batch; the gradients are reduced by Horovod.

    Args:
        wrap: makes a plain Keras optimizer one that reduces its gradients, or that also shards its state.

    Attributes:
        ranks: all of the job.
        data_set: those between which the global batch is divided.
    """

    name: ClassVar[str] = "horovod"
    several_optimizers: ClassVar[bool] = True

    def __init__(self, wrap: Callable[[Any, Reduction], Any] = distribute) -> None:
        super().__init__()
        self._wrap = wrap
        self.ranks: Communicator = ALL_RANKS
        self.data_set: Communicator = ALL_RANKS

    def start(self, seed: int) -> Rank:
        rank = super().start(seed)
        self.part = Part(rank.rank, rank.size)
        self.workers = rank.size
        self.is_first = rank.is_first
        return rank

    def distribute(self, optimizer: Any) -> Any:
        if not is_distributed(optimizer):
            return self._wrap(optimizer, Reduction(weighted=self.adds_up))
        reducer = reducer_of(optimizer)
        _check_reduction(reducer.reduction)
        reducer.reduction = replace(reducer.reduction, weighted=self.adds_up)
        return optimizer

    def prepare(self, model: keras.Model, data: Any, what: str) -> Steps:
        self.build_variables(model, data, what)
        self.broadcast(model)
        fold_rank_into_seeds(model, self.part.index)
        return RankSteps(model, self.data_set, self.part.count)

    def build_variables(self, model: keras.Model, data: Any, what: str) -> None:
        """Create all variables, and compare their shapes over the ranks."""
        build_model(model, data)
        built = {
            "the model's variables": [[list(v.shape), str(v.dtype)] for v in model.variables],
            "the metrics": metric_names(model),
            "the states of the metrics": [
                list(tf_variable(v).shape) for v in state_variables(model.metrics)
            ],
        }
        require_equal(built, what, "model")

    def prepare_prediction(self, model: keras.Model, inputs: Any) -> Steps:
        symbolic_call(model, inputs)
        broadcast_variables(model.variables)
        return RankSteps(model, self.data_set, self.part.count)

    def probe(self, steps: Steps, share: Share) -> None:
        if isinstance(steps, RankSteps):
            steps.probe(share)

    def broadcast(self, model: keras.Model, without: Sequence[Any] = ()) -> None:
        broadcast_variables(shared_state(model, without))
        for optimizer in optimizers_of(model):
            share_loaded(optimizer)

    def check_step(self, model: keras.Model, when: str) -> None:
        # Statistics of a step differ by nature; they are averaged when the epoch ends.
        check_replicas(variables=trained_variables(model), when=when)

    def check(self, model: keras.Model, when: str) -> None:
        check_replicas(model, when=when)

    def logs(self, model: keras.Model, step_logs: Logs, share: Share) -> Logs:
        return merged_logs(model, step_logs, share, self.data_set)

    def end_epoch(self, model: keras.Model) -> None:
        average_statistics(model, local_variables(model), self.data_set)

    def gather(self, outputs: Iterable[tuple[Share, Any]]) -> Any:
        return gather_predictions(outputs, self.data_set)

    def save(self, model: keras.Model, path: Path) -> None:
        inner = inner_of(model.optimizer)
        # An optimizer in parts: all ranks enter.
        whole_state = getattr(inner, "whole_state", None)
        with whole_state() if whole_state else HorovodStrategy.as_one_process(self, model):
            if self.is_first:
                write_model(model, path)

    def load(self, model: keras.Model, path: Path) -> None:
        self.build_to_load(model)
        on_first(lambda: read_model(model, path), "load", self.ranks)
        self.broadcast(model, without=seed_variables(model))
        share_out(optimizers_of(model), self.data_set, self.adds_up)

    def as_one_process(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        return as_one_process(optimizers_of(model), self.data_set, self.adds_up)

    def restored_by_first(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        return restored_by_first(optimizers_of(model), self.data_set, self.adds_up)

    @property
    def adds_up(self) -> bool:
        """Whether the ranks' gradients are weighted by their shares before they are accumulated."""
        return self.part.count > 1


def shared_state(model: keras.Model, without: Sequence[Any] = ()) -> list[Any]:
    """Return the variables of a model and its optimizers that are the same on all ranks, except `without`."""
    own = [*local_variables(model), *row_states(model), *without]
    found = list(model.variables)
    for optimizer in optimizers_of(model):
        own += accumulators(optimizer)
        found += optimizer.variables
    kept = {id(tf_variable(v)) for v in own}
    return [v for v in found if id(tf_variable(v)) not in kept]


def _check_reduction(reduction: Reduction) -> None:
    """Raise UsageError for a distributed optimizer that does something else than the Trainer promises."""
    if reduction.op != Average:
        raise UsageError(
            "Trainer averages the gradients exactly over all examples: give it an optimizer distributed with "
            "op=Average, or a plain one. op=Sum and op=Adasum work with hvdtrain.keras and model.fit"
        )
    if not reduction.process_set.are_all():
        raise UsageError(
            "Trainer trains on all ranks: give it an optimizer without process_set. Process sets work with "
            "hvdtrain.keras and model.fit"
        )
