"""Base class of the strategies with several replicas in one process."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.metrics import check_additive
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.building import build_model, symbolic_call
from hvdtrain.keras_internals.optimizers import is_distributed
from hvdtrain.runtime import Rank, init
from hvdtrain.strategies.replica_steps import ReplicaSteps
from hvdtrain.strategies.strategy import Strategy


class ReplicaStrategy(Strategy):
    """Strategy whose variables are created in `scope`; subclasses choose the replicas and their steps."""

    def __init__(self) -> None:
        super().__init__()
        self._strategy: tf.distribute.Strategy | None = None

    def start(self, seed: int) -> Rank:
        rank = init(seed, whole_machine=True)
        if rank.size > 1:
            raise UsageError(
                f"strategy {self.name} runs in one process, with all devices that it computes on, but {rank.size} "
                f"ranks were started: start one (hvdtrain run --strategy {self.name})"
            )
        self._strategy = self.connect()
        self.workers = self._strategy.num_replicas_in_sync
        return rank

    def connect(self) -> tf.distribute.Strategy:
        """Return TensorFlow's strategy over the replicas; raise UsageError if there are none."""
        raise NotImplementedError

    def steps(self, model: keras.Model, examples: int) -> ReplicaSteps:
        """Return the steps of a built model, for global batches of up to `examples` examples."""
        raise NotImplementedError

    def distribute(self, optimizer: Any) -> Any:
        if is_distributed(optimizer):
            raise UsageError(
                f"strategy {self.name}: the optimizer is distributed by Horovod, and the replicas of one process are "
                "not its ranks: pass the Trainer the plain optimizer, without DistributedOptimizer"
            )
        return optimizer

    def reset_metrics(self, model: keras.Model) -> None:
        super().reset_metrics(model)
        check_additive(model.metrics)

    def prepare(self, model: keras.Model, data: Any, what: str) -> ReplicaSteps:
        with self.scope():
            build_model(model, data)
        return self.steps(model, _examples(data))

    def prepare_prediction(self, model: keras.Model, inputs: Any) -> ReplicaSteps:
        with self.scope():
            symbolic_call(model, inputs)
        return self.steps(model, _examples(inputs))


def _examples(data: Any) -> int:
    return int(tf.nest.flatten(data)[0].shape[0])
