"""PipelineStrategy: synchronous training of a model that is cut into stages, on a mesh of data x pipeline x tensor.

`Trainer.model` is this rank's stage: a Keras model of its layers, under their names, with its own compiled optimizer.
So callbacks that look at the logs (EarlyStopping, ReduceLROnPlateau, also restoring weights) work as
ever, on every rank alike; the first stage's `model.summary()` shows the first stage. Losses and metrics live on the
last stage, and all ranks are told their values. `strategy.stage.whole` is the whole graph, of which only this
stage's variables have values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.agreement import exchange, require_equal
from hvdtrain.data import Part, Share
from hvdtrain.errors import UsageError
from hvdtrain.keras import compat, compat_graph
from hvdtrain.keras.compat_variables import initialize, waiting_variables
from hvdtrain.keras.optimizer import DistributedOptimizer, reducer_of
from hvdtrain.keras.statistics import fold_rank_into_seeds
from hvdtrain.keras.variables import (
    broadcast_variables,
    check_replicas,
    tf_variable,
    trained_variables,
)
from hvdtrain.metrics import merge_state
from hvdtrain.parallel.layout import Layout
from hvdtrain.parallel.mesh import Place, Position, position
from hvdtrain.parallel.pipeline.exchange import Exchange
from hvdtrain.parallel.pipeline.stages import Stage, cut, stage_variables
from hvdtrain.parallel.pipeline.steps import PipelineSteps
from hvdtrain.parallel.pipeline.transport import make_transport
from hvdtrain.runtime import Rank, init
from hvdtrain.strategies.gather import gather_predictions
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.strategy import Logs, ModelSource


class PipelineStrategy(HorovodStrategy):
    """Each rank holds one stage of the model (its part of the layers, where these are split as well).

    Args:
        layout: the mesh, where to cut, and into how many micro-batches.
        wrap: makes a Keras optimizer distributed.
    """

    name: ClassVar[str] = "pipeline"
    position: Position
    stage: Stage

    def __init__(self, layout: Layout, wrap: Callable[..., Any] = DistributedOptimizer) -> None:
        super().__init__(wrap)
        self.layout = layout

    def start(self, seed: int) -> Rank:
        rank = init(seed, self.layout.mesh)
        self.position = position(self.layout.mesh.for_ranks(rank.size))
        self.part = Part(self.position.data_index, self.position.mesh.data)
        self.workers = self.position.mesh.data
        self.is_first = rank.is_first
        self.data_set = self.position.data_set
        return rank

    def build(self, model: ModelSource) -> keras.Model:
        """Return the model of this rank's stage; of the others only the shapes stay."""
        with waiting_variables():
            whole = super().build(model)
        mesh = self.position.mesh
        self.stage = cut(whole, self.position.stage, mesh.pipeline, self.layout.stages)
        own, others = stage_variables(self.stage)
        for variable in own:
            initialize(variable)
        for variable in others:
            compat_graph.release(variable)
        return self.stage.model

    def distribute(self, optimizer: Any) -> Any:
        if compat.is_distributed(optimizer):
            raise UsageError(
                "The optimizer is distributed already; Trainer(layout=...) reduces over the ranks of each stage: give "
                "it a plain optimizer"
            )
        return self._wrap(optimizer, process_set=self.data_set)

    def prepare(self, model: keras.Model, data: Any, what: str) -> PipelineSteps:
        self.build_variables(model, data, what)
        names = self._agree_on_metrics(model)
        self.broadcast(model)
        fold_rank_into_seeds(model, self.part.index)
        return self._steps(model, names)

    def build_variables(self, model: keras.Model, data: Any, what: str) -> None:
        if model.jit_compile:
            raise UsageError(
                "jit_compile=True does not work with pipeline stages, which send between the passes: leave it out"
            )
        if self.stage.is_last:
            _, y, weight = (*data, None, None)[:3]
            compat_graph.build_compiled(model, _any_batch(y), _any_batch(weight))
        else:
            compat_graph.drop_compiled(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        facts = {
            "the layers of the stages": self.stage.names,
            "the model's inputs": [[list(t.shape), str(t.dtype)] for t in self.stage.whole.inputs],
        }
        require_equal(facts, what, "model")

    def prepare_prediction(self, model: keras.Model, inputs: Any) -> PipelineSteps:
        del inputs
        self._broadcast(model.variables)
        return self._steps(model, [])

    def broadcast(self, model: keras.Model, without: Sequence[Any] = ()) -> None:
        optimizer = model.optimizer
        kept = {id(tf_variable(v)) for v in [*reducer_of(optimizer).local_variables, *without]}
        state = [*model.variables, *optimizer.variables]
        self._broadcast([v for v in state if id(tf_variable(v)) not in kept])

    def check_step(self, model: keras.Model, when: str) -> None:
        check_replicas(variables=trained_variables(model), when=when, process_set=self.data_set)

    def check(self, model: keras.Model, when: str) -> None:
        check_replicas(model, when=when, process_set=self.data_set)

    def logs(self, model: keras.Model, step_logs: Logs, share: Share) -> dict[str, float]:
        merge_state(model.metrics, self.data_set)
        found = {name: float(value) for name, value in model.get_metrics_result().items()}
        # What the stages add to the loss, penalties of their weights, belongs to it; the rest is the last one's.
        everyone = exchange(found, "pipeline_logs")
        mesh = self.position.mesh
        stages = [
            everyone[mesh.rank(Place(self.position.data_index, stage, self.position.tensor_index))]
            for stage in range(mesh.pipeline)
        ]
        return stages[-1] | {"loss": sum(logs["loss"] for logs in stages)}

    def gather(self, outputs: Iterable[tuple[Share, Any]]) -> Any:
        whole = self.stage.whole
        if not self.stage.is_last:
            for _ in outputs:
                pass
            flat: list[np.ndarray] = []
        else:
            flat = tf.nest.flatten(gather_predictions(outputs, self.data_set))
        return compat_graph.like_outputs(whole, self._from_last_stage(flat))

    def _from_last_stage(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Give all stages the arrays of the last one. A collective of the ranks of one copy."""
        pipeline = self.position.pipeline_set
        facts = exchange([[list(a.shape), a.dtype.name] for a in arrays], "pipeline_outputs")
        root = self._rank_of(self.stage.count - 1)
        result = []
        for index, (shape, dtype) in enumerate(facts[root]):
            kind = tf.as_dtype(dtype).as_numpy_dtype
            mine = arrays[index] if arrays else np.zeros(shape, kind)
            bits = np.ascontiguousarray(mine).reshape(-1).view(np.uint8)
            name = f"hvdtrain_pipeline_output_{index}"
            got = hvd.broadcast(tf.constant(bits), root, name=name, process_set=pipeline)
            result.append(got.numpy().view(kind).reshape(shape))
        return result

    def _steps(self, model: keras.Model, names: Sequence[str]) -> PipelineSteps:
        place = self.position
        ranks = [self._rank_of(stage) for stage in range(place.mesh.pipeline)]
        neighbours = [ranks[s] for s in (place.stage - 1, place.stage + 1) if 0 <= s < len(ranks)]
        pairs = {rank: place.pair_set(rank) for rank in neighbours}
        return PipelineSteps(
            self.stage,
            Exchange(self.stage, ranks, make_transport(pairs)),
            reducer_of(model.optimizer),
            self.layout.micro_batches,
            names,
        )

    def _agree_on_metrics(self, model: keras.Model) -> list[str]:
        """Return the names of the losses and metrics, which the last stage knows. A collective."""
        mine = {"names": compat.metric_names(model), "complaint": self._complaint(model)}
        last = exchange(mine, "pipeline_metrics")[self._rank_of(self.stage.count - 1)]
        if last["complaint"]:
            raise UsageError(last["complaint"])
        return list(last["names"])

    def _complaint(self, model: keras.Model) -> str | None:
        if not self.stage.is_last or self.layout.micro_batches == 1:
            return None
        masked = any(compat_graph.mask_of(t) is not None for t in self.stage.whole.outputs)
        weighted = [
            loss.name
            for loss in compat.compiled_losses(model)
            if loss.reduction == "mean_with_sample_weight"
        ]
        if not masked and not weighted:
            return None
        what = f"the loss {weighted[0]!r}" if weighted else "the loss of outputs with a mask"
        return (
            f"micro_batches={self.layout.micro_batches}: {what} is divided by a number that is known only when all "
            "micro-batches have been through the model: use micro_batches=1, a loss of reduction='sum', or sample "
            "weights instead of the mask"
        )

    def _rank_of(self, stage: int) -> int:
        """The rank of another stage of this copy of the model."""
        place = self.position
        return place.mesh.rank(Place(place.data_index, stage, place.tensor_index))

    def _broadcast(self, variables: Iterable[Any]) -> None:
        first = self.position.mesh.rank(Place(0, self.position.stage, self.position.tensor_index))
        broadcast_variables(variables, first, self.data_set)


def _any_batch(data: Any) -> Any:
    """`data` with any number of examples, as the model's own symbolic tensors have."""
    if data is None:
        return None
    return tf.nest.map_structure(
        lambda tensor: keras.KerasTensor((None, *tensor.shape[1:]), tensor.dtype), data
    )
