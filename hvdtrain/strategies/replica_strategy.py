"""Base class of the strategies with several replicas in one process."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.metrics import check_additive
from hvdtrain.keras_internals.building import symbolic_call
from hvdtrain.strategies.replica_steps import ReplicaSteps, build
from hvdtrain.strategies.strategy import Strategy


class ReplicaStrategy(Strategy):
    """Strategy whose variables are created in `scope`; subclasses choose the replicas in `steps`."""

    def steps(self, model: keras.Model, examples: int) -> ReplicaSteps:
        """Return the steps of a built model, for global batches of up to `examples` examples."""
        raise NotImplementedError

    def reset_metrics(self, model: keras.Model) -> None:
        super().reset_metrics(model)
        check_additive(model.metrics)

    def prepare(self, model: keras.Model, data: Any, what: str) -> ReplicaSteps:
        with self.scope():
            examples = build(model, data)
        return self.steps(model, examples)

    def prepare_prediction(self, model: keras.Model, inputs: Any) -> ReplicaSteps:
        with self.scope():
            symbolic_call(model, inputs)
        return self.steps(model, int(tf.nest.flatten(inputs)[0].shape[0]))
