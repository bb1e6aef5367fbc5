"""Small scripts, run on all ranks as `hvdtrain run --adopt` does, beside one plain process.

Each does one thing that few scripts do.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from adopt import run_beside
from results import far

from hvdtrain.adopt.__main__ import run_adopted
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import any_rank
from hvdtrain.worker.main_module import run_script

BEGIN = """
import datetime, keras, numpy as np, tempfile, tensorflow as tf
keras.utils.set_random_seed(3)
x = np.random.normal(size=(48, 4)).astype("float32")
y = x[:, :1] ** 2
found = {}
def built(*layers):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model
"""

FILES = """
model = built()
model.save_weights("mine.weights.h5")
drawn, now = tempfile.mkdtemp(), datetime.datetime.now().strftime("%H%M%S%f")
names = ["mine.weights.h5", f"{drawn}/w.weights.h5", f"runs/{now}/w.weights.h5", f"at-{now}-{{epoch}}.weights.h5"]
writers = [keras.callbacks.ModelCheckpoint(name, save_weights_only=True) for name in names]
log = keras.callbacks.CSVLogger(f"{now}.csv")
for _ in range(2):
    model.fit(x, y, epochs=2, verbose=0, callbacks=[*writers, log])
    for name in names:
        other = built()
        other.load_weights(name.format(epoch=2))
        found.setdefault(name.replace(now, "").replace(drawn, ""), []).append(other.get_weights())
    found.setdefault("log", []).append(np.loadtxt(f"{now}.csv", delimiter=",", skiprows=1, usecols=(0, 1)))
"""

SCRIPTS = {"files of callbacks": FILES}


def case_small() -> dict[str, float]:
    """Return how far the values of `found` in each script are from those of one process."""
    apart: dict[str, float] = {}
    for name, text in SCRIPTS.items():
        found, wanted = _found(name, text, adopted=True), _found(name, text, adopted=False)
        assert set(found) == set(wanted)
        apart |= {f"{name}: {key}": far(found[key], wanted[key], "relative") for key in wanted}
    return apart


def _found(name: str, text: str, adopted: bool) -> dict[str, Any]:
    """Run a script, in a folder of all ranks or as one process in this rank's."""
    where = "all" if adopted else f"rank {ALL_RANKS.rank()}"
    script = Path(os.environ["FOLDER"], where, name, "script.py")
    if ALL_RANKS.rank() == 0 or not adopted:
        script.parent.mkdir(parents=True)
        script.write_text(BEGIN + text)
    any_rank(False, "script_is_there")
    run = partial(run_adopted, str(script), []) if adopted else partial(run_script, str(script))
    run_beside(run, script.parent)
    found: dict[str, Any] = vars(sys.modules["__main__"])["found"]
    any_rank(False, "all_have_ended")
    return found
