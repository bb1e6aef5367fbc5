"""The steps of own_models on ranks, by model.fit and by the Trainer with XLA, against plain Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
from own_models import ALL, Own, compiled_model, decaying
from small import BATCH, STEPS, difference, own_part

import hvdtrain
import hvdtrain.keras as hvd

RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH * STEPS, 3)).astype("float32")
Y = RNG.normal(size=(BATCH * STEPS, 1)).astype("float32")
FIT = {"shuffle": False, "verbose": 0}


def apart(kind: type[Own]) -> dict[str, float]:
    plain = compiled_model(kind, decaying(), jit_compile=False)
    logs = plain.fit(X, Y, batch_size=BATCH, **FIT).history
    of_state = {name for name in ("norm", "rate") if name in logs}
    found = {}

    model = compiled_model(kind, hvd.DistributedOptimizer(decaying()), jit_compile=True)
    mine = model.fit(own_part(X), own_part(Y), batch_size=BATCH // hvd.size(), **FIT).history
    found["fit"] = far(model, mine, plain, logs, of_state)

    trained = compiled_model(kind, decaying(), jit_compile=True)
    trainer = hvdtrain.Trainer(trained, global_batch_size=BATCH)
    found["Trainer"] = far(trained, trainer.fit((X, Y), **FIT).history, plain, logs, of_state)
    return found


def far(model: Own, logs: Any, plain: Own, wanted: Any, names: set[str]) -> float:
    apart = [difference(model.get_weights(), plain.get_weights())]
    return max([*apart, *(float(np.abs(logs[n][0] - wanted[n][0])) for n in names)])


def case_jit() -> dict[str, dict[str, float]]:
    return {kind.__name__: apart(kind) for kind in ALL}
