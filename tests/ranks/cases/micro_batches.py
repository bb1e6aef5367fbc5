"""Models that no mesh divides, trained in micro-batches, against plain Keras with the whole global batch."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
from pipeline import PADDED, TAGS, small, tagger
from small import optimizers
from stages_against_keras import FACTS, WEIGHT, X, Y, apart, trainer_of, transformer, weights

from hvdtrain import Layout, Mesh, Trainer
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.errors import UsageError
from hvdtrain.keras import DistributedOptimizer
from hvdtrain.parallel.pipeline import fitting_count

ROOM = 45_000
"""Bytes. A step of a whole share takes more, one of a quarter of it less."""


def case_adam() -> dict[str, Any]:
    """Weights of examples, penalties, a norm over all gradients; a tail for which a rank is idle."""
    return apart(
        lambda: transformer(penalty=1e-2, attention_bias=False),
        lambda: optimizers.Adam(1e-3, global_clipnorm=0.3),
        (X, Y, WEIGHT),
        {"validation_data": (X, Y)},
        lambda: {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]},
        pipeline=1,
        micro_batches=3,
        watch=True,
    )


def case_padding() -> dict[str, Any]:
    """The loss is a mean over the words that are no padding, of all micro-batches of all ranks."""
    return apart(
        tagger,
        lambda: optimizers.SGD(0.3, momentum=0.9),
        (PADDED, TAGS),
        {"epochs": 2},
        pipeline=1,
        micro_batches=5,
    )


def case_sharded_optimizer() -> dict[str, Any]:
    """More micro-batches than a rank has examples."""
    return apart(
        transformer,
        lambda: optimizers.Adam(1e-3, epsilon=1e-3),
        (X, Y),
        {"epochs": 2},
        pipeline=1,
        micro_batches=32,
        shard_optimizer=True,
        weights_only=True,
    )


def case_split_layers() -> dict[str, Any]:
    """Tensor parallel, on four ranks."""
    return apart(
        transformer,
        lambda: optimizers.SGD(0.05, momentum=0.9),
        (X, Y),
        {"epochs": 1},
        weights_only=True,
        pipeline=1,
        micro_batches=2,
        tensor=2,
        split={"attention_[01]": "heads", "up_.*": "column", "down_.*": "row"},
    )


def case_auto() -> dict[str, Any]:
    """The second rank has less room than the first: both take the number that it needs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    room = fitting_count.room_for_step
    fitting_count.room_for_step = lambda model: (2**40, ROOM)[ALL_RANKS.rank()]
    logging.getLogger("hvdtrain").addHandler(handler)
    try:
        found = apart(
            transformer,
            lambda: optimizers.SGD(0.05, momentum=0.9),
            (X, Y),
            {"epochs": 2},
            weights_only=True,
            pipeline=1,
            micro_batches="auto",
        )
    finally:
        fitting_count.room_for_step = room
        logging.getLogger("hvdtrain").removeHandler(handler)
    return found | {"said": [text for text in said if "auto" in text]}


def case_distributed_optimizer() -> float:
    """An optimizer that was distributed before, as compression needs it, against one that the Trainer distributes."""
    found = []
    for wrap in (lambda optimizer: optimizer, DistributedOptimizer):
        trainer = trainer_of(small, wrap(optimizers.SGD(0.1)), pipeline=1, micro_batches=3)
        trainer.fit(FACTS, Y, verbose=0)
        found.append(weights(trainer))
    return max(float(np.abs(found[0][path] - found[1][path]).max()) for path in found[0])


class Named(keras.layers.Layer):
    """Not registered, so that the model could not be made again from its configuration."""

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(x)


def case_the_users_model() -> dict[str, Any]:
    """The model that was given is trained, and its files are those of a model that is not divided."""
    keras.utils.set_random_seed(1)
    outer = keras.layers.Dense(5, name="out")
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(8), Named(), outer])
    trainer = trainer_of(model, optimizers.SGD(0.1), pipeline=1, micro_batches=4)
    folder = Path(os.environ["FOLDER"])
    files = [
        keras.callbacks.ModelCheckpoint(folder / "all.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore(folder / "backup"),
    ]
    before = outer.kernel.numpy()
    trainer.fit(FACTS, Y, verbose=0, callbacks=files)
    after = outer.kernel.numpy()
    outer.kernel.assign(before)
    ALL_RANKS.exchange(None, "written")
    model.load_weights(folder / "all.weights.h5")
    return {
        "same": trainer.model is model,
        "moved": float(np.abs(after - before).max()),
        "loaded": float(np.abs(outer.kernel.numpy() - after).max()),
        "sums": [float(w.sum()) for w in weights(trainer).values()],
        "predicts": float(np.abs(model.predict(FACTS, verbose=0) - trainer.predict(FACTS)).max()),
    }


class Own(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(5)

    def call(self, x: Any) -> Any:
        return self.out(x)


def case_refused() -> dict[str, str]:
    def refused(make: Any, **options: Any) -> str:
        layout = Layout(Mesh(), micro_batches=2)
        try:
            trainer = Trainer(make, "sgd", "mse", global_batch_size=16, layout=layout, **options)
            trainer.fit(FACTS, np.zeros((len(FACTS), 5)), verbose=0)
        except UsageError as error:
            return str(error)
        return ""

    def made() -> keras.Model:
        return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(5)])

    return {
        "subclass": refused(Own),
        "jit": refused(made, jit_compile=True),
        "skip": refused(made, on_nan="skip"),
    }
