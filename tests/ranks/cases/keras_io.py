"""Models of the kinds on keras.io: what each comes to when plain Keras trains it, the Trainer, and model.fit."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import keras_io_generative
import keras_io_steps
import keras_io_structured
import keras_io_text
import keras_io_vision
import numpy as np
from keras_io_kit import BATCH, EVEN, EXAMPLES, Example, by_drop_in, by_trainer, plain, vectors

import hvdtrain

SUBMODULES = (
    keras_io_vision,
    keras_io_text,
    keras_io_generative,
    keras_io_structured,
    keras_io_steps,
)
MODELS = [example for room in SUBMODULES for example in room.MODELS][
    :: int(os.environ["KERAS_IO_EVERY"])
]


def case_plain() -> dict[str, Any]:
    return of_all(plain)


def case_trainer() -> dict[str, Any]:
    return of_all(by_trainer)


def case_drop_in() -> dict[str, Any]:
    return of_all(by_drop_in)


def of_all(train: Callable[[Example], Any]) -> dict[str, Any]:
    """What `train` finds for each model; the error, which all ranks have alike, of one that it does not train."""
    found: dict[str, Any] = {}
    for example in MODELS:
        try:
            found[example.name] = train(example)
        except Exception:
            found[example.name] = traceback.format_exc()
    return found


class Seen(keras.callbacks.Callback):
    """The losses that a callback is told while a model is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))


def case_stateful() -> dict[str, Any]:
    """An RNN that remembers each row of the batch before, and what callbacks of evaluate are told."""
    share, seen = BATCH // hvd.size(), Seen()
    x, y = vectors(80, 6).reshape(EXAMPLES, 2, 3)[:EVEN], vectors(81, 1)[:EVEN]

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.layers.Input(batch_shape=(share, 2, 3)),
                keras.layers.LSTM(4, stateful=True),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    if hvd.size() == 1:
        model = make()
        model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
        loss = model.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[seen])
    else:
        trainer = hvdtrain.Trainer(make, global_batch_size=BATCH, seed=1)
        trainer.fit(x, y, epochs=3, shuffle=False, verbose=0)
        loss, model = trainer.evaluate(x, y, verbose=0, callbacks=[seen]), trainer.model
    trained = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
    return {"weights": trained.astype(float).tolist(), "losses": [*seen.losses, loss]}
