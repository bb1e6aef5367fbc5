"""A Trainer in an elastic job, for test_elastic_trainer.py: `elastic_trainer.py FOLDER SECONDS`.

Each worker appends a line of JSON for each step, which takes SECONDS, to the file FOLDER/events. The first rank 1 kills
itself in step 8.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain

FOLDER, SECONDS = Path(sys.argv[1]), float(sys.argv[2])
STEPS, EPOCHS = 5, 6
X = np.random.default_rng(0).normal(size=(12 * STEPS, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def build() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])


class Steps(keras.callbacks.Callback):
    """Writes down each step; slow enough for hosts to come."""

    def __init__(self, trainer: hvdtrain.Trainer) -> None:
        super().__init__()
        self.trainer = trainer
        self.done = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = self.epoch * STEPS + batch
        rank = self.trainer.rank
        with (FOLDER / "events").open("a+") as events:
            events.seek(0)
            killed = "dies" in events.read()
            dies = not killed and rank.rank == 1 and step == 8
            what = "dies" if dies else "trains"
            line = {"what": what, "pid": os.getpid(), "rank": rank.rank, "size": rank.size}
            events.write(json.dumps(line | {"step": step}) + "\n")
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SECONDS)


trainer = hvdtrain.Trainer(
    build,
    keras.optimizers.Adam(0.01),
    "mse",
    global_batch_size=12,
    run_dir=FOLDER / "run",
    checkpoints=hvdtrain.Checkpoints(every_steps=2),
    seed=1,
)
trainer.fit(X, Y, epochs=EPOCHS, callbacks=[Steps(trainer)], verbose=0)
