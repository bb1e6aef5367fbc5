"""HorovodStrategy: synchronous training with one process per worker. The default.

It is composed of three parts, so that a new way to divide a model over ranks replaces only one of them: the process
sets of the mesh (collectives.mesh), the way a model is built and run (runner), and the way its state is saved and
loaded (training_state).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import Average
from hvdtrain.collectives.mesh import Mesh, Position, position
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.collectives.replicas import check_replicas
from hvdtrain.collectives.statistics import average_statistics, fold_rank_into_seeds
from hvdtrain.data import Part, Share
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import distribute, reducer_of
from hvdtrain.keras_internals.elementwise import require_elementwise
from hvdtrain.keras_internals.optimizers import inner_of, is_distributed
from hvdtrain.keras_internals.shards import mark_slots
from hvdtrain.keras_internals.variables import (
    local_variables,
    replicated_variables,
    seed_variables,
    trained_variables,
    without,
)
from hvdtrain.runtime import Rank, init
from hvdtrain.strategies.runner import Runner
from hvdtrain.strategies.strategy import Logs, ModelSource, Steps, Strategy
from hvdtrain.strategies.training_state import StateIO, WholeState, broadcast, broadcast_state


class HorovodStrategy(Strategy):
    """Synchronous training: each rank computes its share of the global batch, and Horovod reduces the gradients.

    Args:
        mesh: Mesh of ranks. None: each rank has the whole model.
        runner: Makes the Runner that builds and runs the model, given this rank's position.
        state: Makes the StateIO that saves and loads, given this rank's position.
        wrap: Makes a plain Keras optimizer reduce its gradients, and possibly shard its state; or neither.

    Attributes:
        position: Position of this rank in the mesh, after `start`.
        runner: Builds and runs the model.
        state: Saves and loads.
    """

    name: ClassVar[str] = "horovod"
    position: Position
    runner: Runner
    state: StateIO

    def __init__(
        self,
        mesh: Mesh | None = None,
        runner: Callable[[Position], Runner] = Runner,
        state: Callable[[Position], StateIO] = WholeState,
        wrap: Callable[[Any, Reduction], Any] = distribute,
    ) -> None:
        super().__init__()
        self._mesh = mesh
        self._runner = runner
        self._state = state
        self._wrap = wrap

    def start(self, seed: int | None) -> Rank:
        rank = init(seed, self._mesh)
        self.set_position(position(self._mesh or Mesh()))
        return rank

    def set_position(self, here: Position) -> None:
        """Set this rank's position, and all that depends on it."""
        self.position = here
        self.part = Part(here.data_index, here.mesh.data)
        self.workers = here.mesh.data
        self.is_first = here.everyone.rank() == 0
        self.runner = self._runner(here)
        self.state = self._state(here)
        self.saves_together = self.state.together
        self.several_optimizers = not self.saves_together

    def build(self, model: ModelSource) -> keras.Model:
        built = self.runner.build(model)
        variables = built.variables if isinstance(built, keras.Model) else []
        if any(isinstance(one.value, tf.distribute.DistributedValues) for one in variables):
            raise UsageError(
                "The model was made in the scope of a tf.distribute strategy, whose place Horovod's "
                "workers take: make it outside of the scope"
            )
        return built

    def inputs(self, model: keras.Model) -> list[Any]:
        return self.runner.inputs(model)

    def distribute(self, optimizer: Any) -> Any:
        # Gradients weighted by their shares before accumulation add up over the ranks.
        weighted = self.workers > 1
        if not is_distributed(optimizer):
            if self.position.mesh.tensor > 1:
                require_elementwise(inner_of(optimizer), "cannot train split layers")
            ranks = self.position.data_set
            reduction = Reduction(process_set=ranks, weighted=weighted, position=self.position)
            return self._wrap(optimizer, reduction)
        if self.saves_together or self._wrap is not distribute:
            raise UsageError(
                "The optimizer is already distributed; Trainer(layout=...), "
                "shard_optimizer=True and sync=... reduce gradients in their own way, or not at all: pass a plain "
                "optimizer"
            )
        reducer = reducer_of(optimizer)
        _check_reduction(reducer.reduction)
        reducer.reduction = replace(reducer.reduction, weighted=weighted)
        return optimizer

    def prepare(self, model: keras.Model, data: Any, what: str) -> Steps:
        self.runner.build_variables(model, data, what)
        if self.position.mesh.tensor > 1:
            mark_slots(model.optimizer)
        self.broadcast(model)
        fold_rank_into_seeds(seed_variables(model), self.part.index)
        return self.runner.steps(model, data)

    def prepare_prediction(self, model: keras.Model, inputs: Any) -> Steps:
        self.runner.build_to_predict(model, inputs)
        broadcast(model.variables, self.position)
        return self.runner.steps(model)

    def broadcast(self, model: keras.Model, without: Sequence[Any] = ()) -> None:
        self.runner.end_round()
        broadcast_state(model, self.position, without)

    def check_step(self, model: keras.Model, when: str) -> None:
        # Statistics differ within an epoch; they are averaged at its end.
        self._compare(trained_variables(model), when)

    def check(self, model: keras.Model, when: str) -> None:
        self._compare(replicated_variables(model, local=local_variables(model)), when)

    def _compare(self, variables: Sequence[Any], when: str) -> None:
        apart = [] if self.runner.rounds is None else self.runner.rounds.divergent_variables
        for ranks, held in self.position.by_holders(without(variables, apart)):
            check_replicas(variables=held, when=when, process_set=ranks)

    def logs(self, model: keras.Model, step_logs: Logs, share: Share) -> Logs:
        return self.runner.logs(model, step_logs, share)

    def end_epoch(self, model: keras.Model) -> None:
        self.runner.end_round()
        average_statistics(model, local_variables(model), self.position.data_set)

    def gather(self, outputs: Iterable[tuple[Share, Any]]) -> Any:
        return self.runner.gather(outputs)

    def save(self, model: keras.Model, path: Path) -> None:
        self.runner.end_round()
        self.state.save(model, path)

    def load(self, model: keras.Model, path: Path) -> None:
        self.runner.end_round()
        self.build_to_load(model)
        self.state.load(model, path)

    def as_one_process(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        return self.state.as_one_process(model)

    def restored_by_first(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        return self.state.restored_by_first(model)


def _check_reduction(reduction: Reduction) -> None:
    """Raise UsageError unless a distributed optimizer averages gradients over all ranks."""
    if reduction.op != Average:
        raise UsageError(
            "Trainer averages the gradients exactly over all examples: pass an optimizer "
            "distributed with op=Average, or a plain one. op=Sum and op=Adasum work with "
            "hvdtrain.keras and model.fit"
        )
    if not reduction.process_set.is_global():
        raise UsageError(
            "Trainer trains on all ranks: pass an optimizer without process_set. Process sets "
            "work with hvdtrain.keras and model.fit"
        )
