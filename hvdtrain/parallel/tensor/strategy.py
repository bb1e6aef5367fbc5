"""TensorStrategy: synchronous training of a model whose layers are split over ranks, on a mesh of data x tensor.

The ranks of a tensor set compute the same examples: they read the same share, draw the same dropout masks, hold the
same unsplit variables. `Trainer.model` is the model with split layers; what it returns is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import keras

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.divided import Divided, Holders, NormSets
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.collectives.replicas import broadcast_variables, check_replicas
from hvdtrain.data import Part
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import distribute
from hvdtrain.keras_internals.building import symbolic_call
from hvdtrain.keras_internals.elementwise import require_elementwise
from hvdtrain.keras_internals.optimizers import inner_of, is_distributed
from hvdtrain.keras_internals.shards import shard_of
from hvdtrain.keras_internals.variables import (
    local_variables,
    replicated_variables,
    trained_variables,
)
from hvdtrain.parallel.layout import Layout
from hvdtrain.parallel.mesh import Position, position
from hvdtrain.parallel.saving import DividedStrategy
from hvdtrain.parallel.tensor.convert import convert, mark_optimizer
from hvdtrain.runtime import Rank, init
from hvdtrain.strategies.horovod import shared_state
from hvdtrain.strategies.steps import RankSteps
from hvdtrain.strategies.strategy import ModelSource, Steps


class TensorStrategy(DividedStrategy):
    """Each rank holds its parts of the layers that the layout names, and all of the others.

    Args:
        layout: the mesh, and which layers are split how.
        wrap: makes a plain Keras optimizer distributed.
    """

    name: ClassVar[str] = "tensor"
    position: Position

    def __init__(self, layout: Layout, wrap: Callable[[Any, Reduction], Any] = distribute) -> None:
        super().__init__(wrap)
        self.layout = layout

    def start(self, seed: int) -> Rank:
        rank = init(seed, self.layout.mesh)
        self.position = position(self.layout.mesh)
        self.part = Part(self.position.data_index, self.position.mesh.data)
        self.workers = self.position.mesh.data
        self.is_first = rank.is_first
        self.data_set = self.position.data_set
        return rank

    def build(self, model: ModelSource) -> keras.Model:
        with self.scope():
            converted = convert(model, self.layout.split, self.position)
        if self.position.tensor_set.size() > 1:
            self.keep_whole(converted, converted)
        return converted

    def distribute(self, optimizer: Any) -> Any:
        if is_distributed(optimizer):
            raise UsageError(
                "The optimizer is distributed already; Trainer(layout=...) reduces each gradient over the ranks that "
                "hold its variable: give it a plain optimizer"
            )
        if self.position.mesh.tensor > 1:
            require_elementwise(inner_of(optimizer), "cannot train split layers")
        divided = Divided(self._holders, self.position.everyone, self.norms())
        reduction = Reduction(process_set=self.data_set, weighted=self.adds_up, divided=divided)
        return self._wrap(optimizer, reduction)

    def norms(self) -> NormSets:
        """Return over which ranks the squares of gradients add up."""
        return NormSets(self._sets_of_parts)

    def build_variables(self, model: keras.Model, data: Any, what: str) -> None:
        super().build_variables(model, data, what)
        self.mark_state(model)

    def mark_state(self, model: keras.Model) -> None:
        """Mark the state of the built optimizer for parts of variables as parts."""
        mark_optimizer(model.optimizer)

    def prepare_prediction(self, model: keras.Model, inputs: Any) -> Steps:
        symbolic_call(model, inputs)
        self._broadcast(model.variables)
        return RankSteps(model, self.data_set, self.part.count)

    def broadcast(self, model: keras.Model, without: Sequence[Any] = ()) -> None:
        self._broadcast(shared_state(model, without))

    def check_step(self, model: keras.Model, when: str) -> None:
        self._compare(trained_variables(model), when)

    def check(self, model: keras.Model, when: str) -> None:
        self._compare(replicated_variables(model, local=local_variables(model)), when)

    def _holders(self, variable: Any) -> Holders | None:
        """Return over which ranks the gradient of `variable` is reduced."""
        if shard_of(variable) is not None:
            return None
        # All that hold it, so that it stays equal to the last bit; those of a tensor set did the same work.
        return Holders(self.position.stage_set, self.position.mesh.tensor)

    def _sets_of_parts(self, variable: Any) -> tuple[Communicator, ...]:
        return () if shard_of(variable) is None else (self.position.tensor_set,)

    def _by_holders(self, variables: Iterable[Any]) -> list[tuple[Communicator, list[Any]]]:
        """Return the variables with the ranks that hold the same values."""
        parts: list[Any] = []
        wholes: list[Any] = []
        for variable in variables:
            (wholes if shard_of(variable) is None else parts).append(variable)
        found = [(self.position.stage_set, wholes), (self.position.data_set, parts)]
        return [(ranks, held) for ranks, held in found if held and ranks.size() > 1]

    def _broadcast(self, variables: Iterable[Any]) -> None:
        for ranks, held in self._by_holders(variables):
            broadcast_variables(held, root_rank=ranks.ranks[0], process_set=ranks)

    def _compare(self, variables: Iterable[Any], when: str) -> None:
        for ranks, held in self._by_holders(variables):
            check_replicas(variables=held, when=when, process_set=ranks)
