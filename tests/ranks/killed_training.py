"""A training that is killed and run again, for test_kills.py: `killed_training.py FOLDER`.

Each rank writes its process's number to FOLDER/pid.RANK after its first step. Rank 0 writes what came of it to
FOLDER/result.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain

FOLDER = Path(sys.argv[1])
X = np.random.default_rng(0).normal(size=(240, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Slow(keras.callbacks.Callback):
    """Tells that the steps have begun, and leaves time to kill it."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        path = FOLDER / f"pid.{trainer.rank.rank}"
        if not path.exists():
            begun = path.with_name(f"begun.{trainer.rank.rank}")
            begun.write_text(str(os.getpid()))
            begun.rename(path)
        time.sleep(0.03)


def build() -> keras.Model:
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), *layers])
    return model


trainer = hvdtrain.Trainer(
    build,
    keras.optimizers.Adam(0.01),
    "mse",
    ["mae"],
    global_batch_size=8,
    run_dir=FOLDER / "run",
    checkpoints=hvdtrain.Checkpoints(every_steps=3),
)
stop = keras.callbacks.EarlyStopping("loss", patience=5)
history = trainer.fit(X, Y, epochs=4, callbacks=[Slow(), stop], verbose=0)
if trainer.rank.is_first:
    bits = [v.numpy().tobytes().hex() for v in trainer.model.variables]
    (FOLDER / "result").write_text(json.dumps([bits, history.history]))
