"""What the Trainer warns of, or refuses, with several replicas in this process or a stand-in for a TPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import keras
from against_keras import vector_model
from replicas import ON_TPU, Counting, even, trainer_of
from small import layers
from trainer_exact import SGD

from hvdtrain import runtime
from hvdtrain.errors import UsageError
from hvdtrain.keras import DistributedOptimizer, SyncBatchNormalization
from hvdtrain.strategies.central_storage import CentralStorage
from hvdtrain.strategy_names import REPLICAS as REPLICAS_VARIABLE


class Largest(Counting):
    """The largest error so far."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.total.assign(keras.ops.maximum(self.total, error))


def case_metrics_that_do_not_add_up() -> dict[str, list[str]]:
    """What was warned of."""
    found = {}
    for kind in (Counting, Largest):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer_of(vector_model, "mse", metrics=[kind()]).fit(*even(), epochs=2, verbose=0)
        said = [str(each.message) for each in caught]
        found[kind.__name__] = [text for text in said if "'counting'" in text]
    return found


class Centred(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0)


def contrast(y_true: Any, y_pred: Any) -> Any:
    """Compares each example with those of its batch."""
    return keras.ops.max(keras.ops.abs(y_pred - keras.ops.transpose(y_true)), axis=-1)


def case_parts_that_do_otherwise() -> list[str]:
    """What was warned of."""

    def make() -> keras.Model:
        between = [layers.BatchNormalization(), layers.Dropout(0.5), Centred(name="centred")]
        return keras.Sequential([layers.Input((3,)), *between, layers.Dense(1)])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(make, contrast).fit(*even(), epochs=2, verbose=0)
    return [str(w.message) for w in caught if "part of a batch" in str(w.message)]


def case_refusals() -> dict[str, Any]:
    """What cannot be right, in words."""
    found: dict[str, Any] = {}
    dice = keras.losses.Dice()
    found["whole batch"] = refusal(lambda: trainer_of(vector_model, dice).fit(*even(), verbose=0))
    os.environ[REPLICAS_VARIABLE] = "3"
    found["devices in use"] = refusal(lambda: runtime.init(whole_machine=True))
    os.environ[REPLICAS_VARIABLE] = "2"
    found["Horovod's optimizer"] = refusal(
        lambda: trainer_of(vector_model, optimizer=DistributedOptimizer(SGD(0.1)))
    )
    found["Horovod's layer"] = refusal(
        lambda: trainer_of(
            lambda: keras.Sequential([layers.Input((3,)), SyncBatchNormalization()])
        ).fit(*even(), verbose=0)
    )
    found["one device"] = refusal(lambda: CentralStorage(["CPU:1"]).start(0))
    found["no device"] = refusal(lambda: CentralStorage(["CPU:0", "/device:CPU:7"]).start(0))
    if ON_TPU:
        found["eager"] = refusal(
            lambda: trainer_of(vector_model, run_eagerly=True).fit(*even(), verbose=0)
        )
        found["built model"] = refusal(lambda: trainer_of(vector_model()))
        used = SGD(0.1)
        used.build([keras.Variable([1.0])])
        found["used optimizer"] = refusal(lambda: trainer_of(vector_model, optimizer=used))
    else:
        found["jit"] = refusal(
            lambda: trainer_of(vector_model, jit_compile=True).fit(*even(), verbose=0)
        )
    return found


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return "no error"
