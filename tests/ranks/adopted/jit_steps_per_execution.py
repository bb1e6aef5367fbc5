import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import time
import json
import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(2)
X = rng.standard_normal((512, 16), dtype="float32")
W = rng.standard_normal((16, 1), dtype="float32")
Y = np.tanh(X @ W) + 0.05 * rng.standard_normal((512, 1), dtype="float32")


def bench(jit_compile, steps_per_execution):
    keras.backend.clear_session()
    keras.utils.set_random_seed(2)
    net = keras.Sequential([layers.Input((16,)), layers.Dense(32, activation="gelu"), layers.Dense(1)])
    net.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss="mse",
        jit_compile=jit_compile,
        steps_per_execution=steps_per_execution,
    )
    t0 = time.perf_counter()
    h = net.fit(X, Y, batch_size=32, epochs=2, verbose=0)
    return time.perf_counter() - t0, h.history["loss"][-1]


report = []
for jit in (False, True):
    for spe in (1, 8):
        sec, loss = bench(jit, spe)
        print(f"jit_compile={jit!s:5}  steps_per_execution={spe}:  {sec:6.2f} s   loss {loss:.5f}")
        report.append(dict(jit=jit, spe=spe, seconds=sec, loss=loss))

with open("bench.json", "w") as fh:
    json.dump(report, fh, indent=1)
