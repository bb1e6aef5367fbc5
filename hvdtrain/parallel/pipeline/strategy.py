"""PipelineStrategy: synchronous training of a model that is cut into stages, on a mesh of data x pipeline x tensor.

`Trainer.model` is this rank's stage: a Keras model of its layers, under their names, with its own compiled optimizer.
So callbacks that look at the logs (EarlyStopping, ReduceLROnPlateau, also restoring weights) work as
ever, on every rank alike; the first stage's `model.summary()` shows the first stage. Losses and metrics live on the
last stage, and all ranks are told their values. `strategy.stage.whole` is the whole graph, of which only this
stage's variables have values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.agreement import require_equal
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.divided import NormSets
from hvdtrain.collectives.metrics import as_value, merge_state
from hvdtrain.collectives.statistics import fold_rank_into_seeds
from hvdtrain.data import Share
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import reducer_of
from hvdtrain.keras_internals import graph as graph_internals
from hvdtrain.keras_internals.deferred import initialize, waiting_variables
from hvdtrain.keras_internals.losses import needs_whole_batch
from hvdtrain.keras_internals.models import compile_alike, metric_names
from hvdtrain.parallel.collectives import Group
from hvdtrain.parallel.mesh import Place
from hvdtrain.parallel.pipeline.exchange import Exchange
from hvdtrain.parallel.pipeline.late_losses import are_late
from hvdtrain.parallel.pipeline.stages import Stage, cut
from hvdtrain.parallel.pipeline.steps import Measured, PipelineSteps
from hvdtrain.parallel.pipeline.transport import make_transport
from hvdtrain.parallel.tensor.convert import Layers, split_model
from hvdtrain.parallel.tensor.strategy import TensorStrategy
from hvdtrain.strategies.gather import gather_predictions
from hvdtrain.strategies.step_metrics import StepLogs
from hvdtrain.strategies.strategy import Logs, ModelSource


class PipelineStrategy(TensorStrategy):
    """Each rank holds one stage of the model, and of layers that are split as well its part.

    Args:
        layout: the mesh, where to cut, into how many micro-batches, and which layers are split how.
        wrap: makes a Keras optimizer distributed.
    """

    name: ClassVar[str] = "pipeline"
    stage: Stage

    def build(self, model: ModelSource) -> keras.Model:
        """Return the model of this rank's stage; of the others only the shapes stay."""
        with waiting_variables(), self.scope():
            whole = model if isinstance(model, keras.Model) else model()
        place = self.position
        self.stage = cut(whole, place.stage, place.mesh.pipeline, self.layout.stages)
        self.keep_whole(whole, self.stage.model)
        if place.tensor_set.size() > 1:
            split_model(self.stage.model, self._plan_of_stage(whole), Group.of(place.tensor_set))
        for variable in self.stage.model.variables:
            initialize(variable)
        for variable in self.stage.others:
            graph_internals.release(variable)
        compile_alike(self.stage.model, whole)
        return self.stage.model

    def _plan_of_stage(self, whole: keras.Model) -> dict[str, str]:
        """Return the part of the layout's plan that names layers of this stage, or nothing in the model."""

        def named(pattern: str, model: keras.Model) -> bool:
            paths = [path for paths in Layers(model).paths.values() for path in paths]
            return any(re.fullmatch(pattern, path) for path in paths)

        return {
            pattern: way
            for pattern, way in self.layout.split.items()
            if named(pattern, self.stage.model) or not named(pattern, whole)
        }

    def norms(self) -> NormSets:
        return NormSets(self._sets_of_parts, (self.position.pipeline_set,))

    def prepare(self, model: keras.Model, data: Any, what: str) -> PipelineSteps:
        self.build_variables(model, data, what)
        measured = self._agree_on_measured(model, data)
        self.broadcast(model)
        fold_rank_into_seeds(model, self.part.index)
        return self._steps(model, measured)

    def build_variables(self, model: keras.Model, data: Any, what: str) -> None:
        if model.jit_compile:
            raise UsageError(
                "jit_compile=True does not work with pipeline stages, which send between the passes: leave it out"
            )
        if self.stage.is_last:
            graph_internals.build_compiled(model, *self._symbolic_batch(data))
        else:
            graph_internals.drop_compiled(model)
        self.build_optimizer(model)
        self.mark_state(model)
        facts = {
            # Without the numbers that Keras gives: a rank may have made another model before this one.
            "the layers of the stages": [
                [re.sub(r"_\d+$", "", name) for name in names] for names in self.stage.names
            ],
            "the model's inputs": [[list(t.shape), str(t.dtype)] for t in self.stage.whole.inputs],
        }
        require_equal(facts, what, "model")

    def prepare_prediction(self, model: keras.Model, inputs: Any) -> PipelineSteps:
        del inputs
        self._broadcast(model.variables)
        return self._steps(model, Measured())

    def logs(self, model: keras.Model, step_logs: Logs, share: Share) -> Logs:
        assert isinstance(step_logs, StepLogs)
        merge_state(model.metrics, self.data_set, step_logs.rules)
        results = model.get_metrics_result()
        found = {name: np.asarray(value).tolist() for name, value in results.items()}
        # What the stages add to the loss, penalties of their weights, belongs to it; the rest is the last one's.
        everyone = ALL_RANKS.exchange(found, "pipeline_logs")
        mesh = self.position.mesh
        stages = [
            everyone[mesh.rank(Place(self.position.data_index, stage, self.position.tensor_index))]
            for stage in range(mesh.pipeline)
        ]
        last = {name: as_value(value) for name, value in stages[-1].items()}
        return last | {"loss": sum(logs["loss"] for logs in stages)}

    def gather(self, outputs: Iterable[tuple[Share, Any]]) -> Any:
        whole = self.stage.whole
        if not self.stage.is_last:
            for _ in outputs:
                pass
            flat: list[np.ndarray] = []
        else:
            flat = keras.tree.flatten(gather_predictions(outputs, self.data_set))
        return graph_internals.like_outputs(whole, self._from_last_stage(flat))

    def _from_last_stage(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Give all stages the arrays of the last one. A collective of the ranks of one copy."""
        pipeline = self.position.pipeline_set
        facts = ALL_RANKS.exchange(
            [[list(a.shape), a.dtype.name] for a in arrays], "pipeline_outputs"
        )
        root = self._rank_of(self.stage.count - 1)
        result = []
        for index, (shape, dtype) in enumerate(facts[root]):
            kind = tf.as_dtype(dtype).as_numpy_dtype
            mine = arrays[index] if arrays else np.zeros(shape, kind)
            got = pipeline.broadcast(mine, root, f"hvdtrain_pipeline_output_{index}")
            result.append(got.numpy())
        return result

    def _steps(self, model: keras.Model, measured: Measured) -> PipelineSteps:
        place = self.position
        ranks = [self._rank_of(stage) for stage in range(place.mesh.pipeline)]
        neighbours = [ranks[s] for s in (place.stage - 1, place.stage + 1) if 0 <= s < len(ranks)]
        pairs = {rank: place.pair_set(rank) for rank in neighbours}
        return PipelineSteps(
            self.stage,
            Exchange(self.stage, ranks, make_transport(pairs)),
            reducer_of(model.optimizer).reduction.process_set,
            self.layout.micro_batches,
            measured,
        )

    def _symbolic_batch(self, data: Any) -> list[Any]:
        """Return what the model predicts, labels and sample weights, for any number of examples."""
        _, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        whole = self.stage.whole
        outputs = graph_internals.like_outputs(whole, whole.outputs)
        return [_any_batch(outputs), _any_batch(y), _any_batch(weight)]

    def _agree_on_measured(self, model: keras.Model, data: Any) -> Measured:
        """Return what the last stage alone knows of the losses and metrics. A collective."""
        mine: dict[str, Any] = {"names": metric_names(model)}
        if self.stage.is_last:
            divided = self.part.count * self.layout.micro_batches > 1
            mine["complaint"] = needs_whole_batch(model) if divided else None
            mine["late"] = are_late(model, self.stage.whole.outputs, self._symbolic_batch(data))
        last = ALL_RANKS.exchange(mine, "pipeline_metrics")[self._rank_of(self.stage.count - 1)]
        if last["complaint"] is not None:
            raise UsageError(last["complaint"])
        return Measured(tuple(last["names"]), bool(last["late"]))

    def _rank_of(self, stage: int) -> int:
        """The rank of another stage of this copy of the model."""
        place = self.position
        return place.mesh.rank(Place(place.data_index, stage, place.tensor_index))


def _any_batch(data: Any) -> Any:
    """`data` with any number of examples, as the model's own symbolic tensors have."""
    if data is None:
        return None
    return tf.nest.map_structure(
        lambda tensor: keras.KerasTensor((None, *tensor.shape[1:]), tensor.dtype), data
    )
