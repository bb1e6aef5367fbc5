"""Trainer(sync=...) on real ranks: see test_rounds_of_ranks.py. The algorithms: tests/unit/test_rounds.py."""

from __future__ import annotations

from typing import Any

import checkpoints
import keras
import numpy as np
from small import BATCH, IMAGES, LABELS, crossentropy, one_process, optimizers, small_model, weights

import hvdtrain
from hvdtrain.errors import UsageError


def _momentum() -> keras.optimizers.Optimizer:
    return optimizers.SGD(0.1, momentum=0.9)


def _trainer(sync: Any, **options: Any) -> hvdtrain.Trainer:
    return hvdtrain.Trainer(
        small_model,
        _momentum(),
        crossentropy(),
        ["accuracy"],
        global_batch_size=BATCH,
        sync=sync,
        **options,
    )


def case_all() -> dict[str, Any]:
    """One round a step against plain Keras; a short tail; ended in a round and resumed, by the same ranks."""
    every_step = _trainer(hvdtrain.LocalSGD(1))
    every_step.fit(IMAGES, LABELS, shuffle=False, verbose=0)

    # The last batch has one example: a rank is idle. Several steps run at once, across the ends of rounds.
    rows = slice(0, BATCH * 3 + 1)
    tail = _trainer(hvdtrain.DiLoCo(2, exchange="int8"), steps_per_execution=3)
    data = (IMAGES[rows], LABELS[rows])
    history = tail.fit(*data, validation_data=data, epochs=2, verbose=0).history
    path = checkpoints.folder() / "model.keras"
    tail.save(path)
    plain = keras.models.load_model(path)
    loss, accuracy = plain.evaluate(*data, batch_size=BATCH, verbose=0)
    evaluated = [history["val_loss"][-1], history["val_accuracy"][-1]]
    return {
        "as synchronous": one_process(_momentum).apart(weights(every_step.model), "weights"),
        "weights": weights(tail.model),
        "history": history,
        "evaluated": np.abs(np.subtract(evaluated, [loss, accuracy])).max(),
        "resumed": checkpoints.ended_and_resumed(
            "adam", 5, [6], sync=hvdtrain.DiLoCo(3, exchange="int8"), epochs=1
        ),
        # What it takes to be compressed: 1024 numbers. The guard compares the ranks after each epoch.
        "compressed": [
            *checkpoints.ended_and_resumed("power", 5, [6], epochs=1, units=256),
            checkpoints.train(checkpoints.folder(), "largest", None, epochs=1, units=256) is None,
        ],
        "refused": _refused(),
    }


def _refused() -> str:
    callback = keras.callbacks.ModelCheckpoint(checkpoints.folder() / "m.keras", save_freq=2)
    try:
        _trainer(hvdtrain.LocalSGD(2)).fit(IMAGES, LABELS, callbacks=[callback], verbose=0)
    except UsageError as error:
        return str(error)
    return ""
