"""CentralStorage: variables on one device, replicas on the GPUs of one machine.

Each replica reads the variables from their device and computes its rows of the global batch. The gradients are reduced
on that device, where the optimizer runs once. On one machine Horovod is usually faster: this strategy is for models
whose optimizer state (or embedding tables) fits in the host's memory but not in a GPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError, warn_user
from hvdtrain.keras_internals.variables import make_again
from hvdtrain.strategies.replica_steps import ReplicaSteps
from hvdtrain.strategies.replica_strategy import ReplicaStrategy
from hvdtrain.strategies.strategy import ModelSource
from hvdtrain.strategy_names import CENTRAL_STORAGE, REPLICAS, STRATEGY

HINT = (
    f"On a machine without GPUs set {REPLICAS}=2 (or hvdtrain run --strategy {CENTRAL_STORAGE} -np 2) for "
    "two replicas on its cores; with one GPU use the default strategy, horovod"
)


class CentralStorage(ReplicaStrategy):
    """Several replicas in one process that share variables on one device.

    Args:
        compute_devices: Devices such as ["GPU:0", "GPU:1"], with one replica on each. Default: all GPUs; without GPUs,
            as many logical CPU devices as HVDTRAIN_REPLICAS says.
        parameter_device: Device of the variables.
    """

    name: ClassVar[str] = CENTRAL_STORAGE

    def __init__(
        self, compute_devices: Sequence[str] | None = None, parameter_device: str = "CPU:0"
    ) -> None:
        super().__init__()
        self._wanted = compute_devices
        self._parameter_device = parameter_device

    def connect(self) -> tf.distribute.Strategy:
        return tf.distribute.experimental.CentralStorageStrategy(
            self._devices(), self._parameter_device
        )

    def _devices(self) -> list[str]:
        there = [d.name for d in tf.config.list_logical_devices()]
        known = {_short(name) for name in there}
        wanted = self._wanted
        if wanted is None:
            gpus = [name for name in there if ":GPU:" in name]
            wanted = gpus or [name for name in there if ":CPU:" in name]
        for name in [*wanted, self._parameter_device]:
            if _short(name) not in known:
                raise UsageError(
                    f"strategy {CENTRAL_STORAGE}: there is no device {name!r}: TensorFlow sees "
                    f"{', '.join(sorted(known))}. {HINT}"
                )
        if len({_short(name) for name in wanted}) < 2:
            raise UsageError(
                f"strategy {CENTRAL_STORAGE} needs two devices to compute on, but there is "
                f"{', '.join(_short(name) for name in wanted) or 'none'}. {HINT}. (TensorFlow's devices are fixed "
                f"once it is used: {STRATEGY} and {REPLICAS} are read by hvdtrain.init(), so call that first)"
            )
        return list(wanted)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self._parameter_device)

    def build(self, model: ModelSource) -> keras.Model:
        built = super().build(model)
        if self._move(built.variables):
            built.train_function = built.test_function = built.predict_function = None
            warn_user(
                f"strategy {CENTRAL_STORAGE}: the model was made on another device than "
                f"{self._parameter_device}, and has been moved there. Functions that were compiled before, such as "
                "predict of another model with its layers, keep the old weights: pass the Trainer a function that "
                "builds it, Trainer(build_model, ...)"
            )
        return built

    def distribute(self, optimizer: Any) -> Any:
        self._move(super().distribute(optimizer).variables)
        return optimizer

    def _move(self, variables: Iterable[keras.Variable]) -> bool:
        """Move variables to the device for all of them; return whether any was elsewhere."""
        there = _short(self._parameter_device)
        apart = [variable for variable in variables if _short(variable.value.device) != there]
        with self.scope():
            for variable in apart:
                make_again(variable)
        return bool(apart)

    def prepare(self, model: keras.Model, data: Any, what: str) -> ReplicaSteps:
        if model.jit_compile:
            raise UsageError(
                f"jit_compile=True does not work with strategy {CENTRAL_STORAGE}: XLA cannot read variables of another "
                "device. Leave jit_compile out"
            )
        return super().prepare(model, data, what)

    def steps(self, model: keras.Model, examples: int) -> ReplicaSteps:
        assert self._strategy is not None
        return ReplicaSteps(model, self._strategy, examples, self._parameter_device)


def _short(device: str) -> str:
    """Shorten `/device:GPU:0` or `gpu:0` to `GPU:0`."""
    return ":".join(device.rsplit(":", 2)[-2:]).rsplit("/", 1)[-1].upper()
