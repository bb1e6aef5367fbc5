"""StageRunner: a model that is cut into stages, on a mesh of data x pipeline x tensor, and trains in micro-batches.

With one stage the ranks only take their shares in micro-batches, to save memory.

`Trainer.model` is this rank's stage: a Keras model of its layers, with their names and a compiled optimizer of its
own. So callbacks that read the logs (EarlyStopping, ReduceLROnPlateau, also with restored weights) work as usual, and
alike on every rank; `model.summary()` on rank 0 shows the first stage only. The last stage holds the losses and
metrics, and all ranks receive their values. `strategy.runner.stage.whole` is the whole graph, of which only this
stage's variables have values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.mesh import Position
from hvdtrain.collectives.metrics import as_value, merge_state
from hvdtrain.collectives.replicas import require_same_model
from hvdtrain.data import Share
from hvdtrain.errors import UsageError, warn_user
from hvdtrain.keras_internals import graph as graph_internals
from hvdtrain.keras_internals.building import require_loss
from hvdtrain.keras_internals.compiled_losses import (
    build_compiled,
    drop_compiled,
    needs_whole_batch,
    own_losses,
)
from hvdtrain.keras_internals.deferred_variables import deferred_variables_of, initialize, release
from hvdtrain.keras_internals.models import compile_like, metric_names
from hvdtrain.keras_internals.optimizer_state import keep_state_of
from hvdtrain.parallel.layout import Layout
from hvdtrain.parallel.pipeline.fitting_count import agree_on_count
from hvdtrain.parallel.pipeline.normalized_losses import are_late
from hvdtrain.parallel.pipeline.stage_messages import Exchange
from hvdtrain.parallel.pipeline.stage_steps import LastStageMetrics, PipelineSteps
from hvdtrain.parallel.pipeline.stages import Stage, cut
from hvdtrain.parallel.pipeline.transport import make_transport
from hvdtrain.parallel.tensor.convert import Layers, SplitRunner, split_model
from hvdtrain.parallel.whole_model import make_part, require_whole_optimizer
from hvdtrain.strategies import batch_dependence
from hvdtrain.strategies.gather import gather_predictions
from hvdtrain.strategies.runner import Runner
from hvdtrain.strategies.step_metrics import StepLogs
from hvdtrain.strategies.strategy import Logs, ModelSource


class StageRunner(Runner):
    """Runner on a rank that holds one stage of the model, and only its part of the layers that are also split.

    Args:
        layout: Mesh, cuts, number of micro-batches, and the layers to split.
        position: Position of this rank in the mesh.
    """

    stage: Stage
    skips_steps = False

    def __init__(self, layout: Layout, position: Position) -> None:
        super().__init__(position)
        self._layout = layout

    def build(self, model: ModelSource) -> keras.Model:
        """Return the model of this rank's stage; the variables of the other stages are released.

        Raises:
            UsageError: The model cannot be cut or split as the layout says, or be recreated from its configuration.
        """
        place = self.position
        if place.mesh.pipeline == 1:
            whole = SplitRunner(self._layout, place).build(model)
            self.stage = cut(whole, 0, 1)
            return whole
        with deferred_variables_of():
            whole = super().build(model)
        self.stage = cut(whole, place.stage, place.mesh.pipeline, self._layout.stages)
        make_part(self.stage.model, whole)
        optimizer = getattr(whole, "optimizer", None)
        if optimizer is not None:
            keep_state_of(optimizer, self.stage.model.variables)
        compile_like(self.stage.model, whole, optimizer)
        if place.mesh.tensor > 1:
            split_model(self.stage.model, self._plan_of_stage(whole), place.tensor_set)
        for variable in self.stage.model.variables:
            initialize(variable)
        for variable in self.stage.others:
            release(variable)
        return self.stage.model

    def inputs(self, model: keras.Model) -> list[Any]:
        del model  # A stage's inputs are activations; data is for the whole model.
        return list(self.stage.whole.inputs)

    def _plan_of_stage(self, whole: keras.Model) -> dict[str, str]:
        """Return the entries of the layout's plan that match layers of this stage, or no layer of the model."""
        here, anywhere = Layers(self.stage.model), Layers(whole)
        return {
            pattern: way
            for pattern, way in self._layout.split.items()
            if here.named(pattern) or not anywhere.named(pattern)
        }

    def build_variables(self, model: keras.Model, data: Any, what: str) -> None:
        if model.jit_compile:
            raise UsageError(
                "jit_compile=True does not work with pipeline stages and micro-batches, whose passes are separate "
                "functions: leave it out"
            )
        require_whole_optimizer(model)
        require_loss(model, self.stage.whole, data)
        if self.stage.is_last:
            build_compiled(model, *self._symbolic_batch(data))
        else:
            drop_compiled(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        facts = {
            # Without the numbers that Keras appends: a rank may have made another model before this one.
            "the layers of the stages": [
                [re.sub(r"_\d+$", "", name) for name in names] for names in self.stage.names
            ],
            "the model's inputs": [[list(t.shape), str(t.dtype)] for t in self.stage.whole.inputs],
        }
        require_same_model(facts, self.stage.whole, what, "model")

    def build_to_predict(self, model: keras.Model, inputs: Any) -> None:
        del model, inputs  # A stage's variables exist already.

    def steps(self, model: keras.Model, data: Any = None) -> PipelineSteps:
        place = self.position
        measured = LastStageMetrics() if data is None else self._agree_on_measured(model, data)
        ranks = [place.rank_of_stage(stage) for stage in range(place.mesh.pipeline)]
        neighbours = [ranks[s] for s in (place.stage - 1, place.stage + 1) if 0 <= s < len(ranks)]
        pairs = {rank: place.pair_set(rank) for rank in neighbours}

        def in_parts(count: int) -> PipelineSteps:
            exchange = Exchange(self.stage, ranks, make_transport(pairs))
            return PipelineSteps(self.stage, exchange, place.data_set, count, measured)

        count = self._layout.micro_batches
        if isinstance(count, int):
            return in_parts(count)
        # Those that are traced for the choice are not those that train.
        return in_parts(
            1 if data is None else agree_on_count(in_parts(1), model, data, place.everyone)
        )

    def logs(self, model: keras.Model, step_logs: Logs, share: Share) -> Logs:
        assert isinstance(step_logs, StepLogs)
        merge_state(model.metrics, self.position.data_set, step_logs.rules)
        results = model.get_metrics_result()
        found = {name: np.asarray(value).tolist() for name, value in results.items()}
        # The loss includes what the earlier stages add (weight penalties); all other values come from the last stage.
        everyone = self.position.everyone.exchange(found, "pipeline_logs")
        ranks = map(self.position.rank_of_stage, range(self.stage.count))
        stages = [everyone[rank] for rank in ranks]
        last = {name: as_value(value) for name, value in stages[-1].items()}
        return last | {"loss": sum(logs["loss"] for logs in stages)}

    def gather(self, outputs: Iterable[tuple[Share, Any]]) -> Any:
        if self.stage.count == 1:
            return super().gather(outputs)
        whole = self.stage.whole
        if not self.stage.is_last:
            for _ in outputs:
                pass
            flat: list[np.ndarray] = []
        else:
            flat = keras.tree.flatten(gather_predictions(outputs, self.position.data_set))
        return graph_internals.like_outputs(whole, self._from_last_stage(flat))

    def _from_last_stage(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Broadcast the last stage's arrays to all stages. A collective of all ranks."""
        pipeline = self.position.pipeline_set
        facts = self.position.everyone.exchange(
            [[list(a.shape), a.dtype.name] for a in arrays], "pipeline_outputs"
        )
        root = self.position.rank_of_stage(self.stage.count - 1)
        result = []
        for index, (shape, dtype) in enumerate(facts[root]):
            kind = tf.as_dtype(dtype).as_numpy_dtype
            mine = arrays[index] if arrays else np.zeros(shape, kind)
            got = pipeline.broadcast(mine, root, f"hvdtrain_pipeline_output_{index}")
            result.append(got.numpy())
        return result

    def _symbolic_batch(self, data: Any) -> list[Any]:
        """Return symbolic predictions, labels and sample weights, for any number of examples."""
        _, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        whole = self.stage.whole
        outputs = graph_internals.like_outputs(whole, whole.outputs)
        return [_any_batch(outputs), _any_batch(y), _any_batch(weight)]

    def _agree_on_measured(self, model: keras.Model, data: Any) -> LastStageMetrics:
        """Return what only the last stage knows about the losses and metrics. A collective of all ranks."""
        mine: dict[str, Any] = {"names": metric_names(model)}
        divided = self.position.mesh.data > 1 or self._layout.micro_batches != 1
        if self.stage.is_last:
            mine["own losses"] = own_losses(model)
            mine["complaint"] = needs_whole_batch(model) if divided else None
            mine["late"] = are_late(model, self.stage.whole.outputs, self._symbolic_batch(data))
        root = self.position.rank_of_stage(self.stage.count - 1)
        last = self.position.everyone.exchange(mine, "pipeline_metrics")[root]
        if last["complaint"] is not None:
            raise UsageError(last["complaint"])
        warning = batch_dependence.warning_of_parts(
            self.stage.whole, "a micro-batch", last["own losses"]
        )
        if divided and warning is not None and self.position.everyone.rank() == 0:
            warn_user(warning)
        return LastStageMetrics(tuple(last["names"]), bool(last["late"]))


def _any_batch(data: Any) -> Any:
    """Return symbolic tensors like `data`, for any number of examples."""
    if data is None:
        return None
    return tf.nest.map_structure(
        lambda tensor: keras.KerasTensor((None, *tensor.shape[1:]), tensor.dtype), data
    )
