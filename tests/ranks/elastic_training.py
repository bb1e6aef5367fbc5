"""An elastic training with Keras, for test_keras_elastic.py: `elastic_training.py EVENTS`.

Each worker appends lines of JSON to the file EVENTS. The first rank 0 kills itself in epoch 2.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.collectives.replicas import fingerprints
from hvdtrain.keras_internals.variables import replicated_variables
from hvdtrain.worker.heartbeat import current

EVENTS = Path(sys.argv[1])
EPOCHS = 6
X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def say(**event: Any) -> None:
    with EVENTS.open("a") as events:
        events.write(json.dumps({"pid": os.getpid(), "rank": hvd.rank(), **event}) + "\n")


class Killed(keras.callbacks.Callback):
    """SIGKILL of one worker in the middle of a step's batches."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        first = '"dies"' not in EVENTS.read_text()
        if first and hvd.rank() == 0 and state.epoch == 2 and batch == 2:
            say(what="dies")
            os.kill(os.getpid(), signal.SIGKILL)


hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", jit_compile=False)
# Used at the beginning only, so never by a worker that joins later.
model.warm_up = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
model.warm_up.build(model.layers[-1].trainable_variables)


def first_step() -> None:
    """As Horovod's example does, to build the optimizer: before the state is sent to all, and whenever workers join."""
    model.fit(
        X[hvd.rank() :: hvd.size()], Y[hvd.rank() :: hvd.size()], steps_per_epoch=1, verbose=0
    )


first_step()
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([first_step])


@hvd.elastic.run
def train(state: Any) -> str:
    print(f"epoch {state.epoch} on rank {hvd.rank()}", flush=True)
    say(
        what="trains",
        heartbeat=current().rank,
        size=hvd.size(),
        epoch=state.epoch,
        iterations=int(model.optimizer.iterations),
        bits=fingerprints(replicated_variables(model)).tobytes().hex(),
    )
    if state.epoch == 0:
        model.warm_up.apply([v * 0.0 for v in model.layers[-1].trainable_variables])
    model.fit(
        X[hvd.rank() :: hvd.size()],
        Y[hvd.rank() :: hvd.size()],
        batch_size=8,
        epochs=EPOCHS - state.epoch,
        verbose=0,
        callbacks=[
            Killed(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
        ],
    )
    return "finished"


say(
    what=train(state),
    size=hvd.size(),
    epoch=state.epoch,
    iterations=int(model.optimizer.iterations),
)
