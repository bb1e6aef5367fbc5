"""A training whose rank STOPPED is frozen as soon as it is in a phase; and what must then be said."""

from __future__ import annotations

import os
import re

SCRIPT = """
import os, signal, sys, threading, time
from hvdtrain.worker.heartbeat import current

rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
stopped, phase = int(sys.argv[1]), sys.argv[2]

def freeze():
    while current().phase != phase or (phase == "training" and current().step < 3):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGSTOP)

if rank == stopped:
    threading.Thread(target=freeze, daemon=True).start()
    time.sleep(0.1)

import hvdtrain, keras, numpy as np

hvdtrain.init()
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(512), keras.layers.Dense(1)])
trainer = hvdtrain.Trainer(model, "sgd", "mse", global_batch_size=16, seed=1)
x = np.ones((4096, 8), "float32")

class Save(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        for n in range(20):
            self.model.save_weights(f"{rank}.{n}.weights.h5")

trainer.fit((x, x[:, :1]), validation_data=(x, x[:, :1]), epochs=1000, callbacks=[Save()], verbose=0)
"""
PHASES = ("starting", "init", "training", "evaluating", "saving", "callbacks")
ALL_CASES = "HVDTRAIN_ALL_CASES" in os.environ
"""Whether to try each rank in each phase over each controller, and under srun, as before a release."""
LIMIT = "3"
"""Seconds for `--hang-timeout`."""
EXIT_HANG = 124


def assert_named(stderr: str, stopped: int, phase: str, host: str = "") -> None:
    """One sentence says which rank is frozen, and the picture of all ranks says in which phase."""
    place = f" on host {host}" if host else ""
    assert re.search(
        rf"^rank {stopped}{place} \(process \d+\) is stopped \(SIGSTOP\), and the others are waiting",
        stderr,
        re.MULTILINE,
    ), stderr
    words = {"init": "hvdtrain.init()", "starting": "start-up", "evaluating": "evaluation"}
    word = words.get(phase, phase)
    assert re.search(
        rf"^  rank {stopped}: in {re.escape(word)}.*, stopped$", stderr, re.MULTILINE
    ), stderr
