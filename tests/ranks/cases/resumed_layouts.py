"""Fits that are ended, and resumed where the ranks are arranged otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
from checkpoints import EPOCHS, STEPS, folder, refusal, train

from hvdtrain import Layout, Mesh

SPLIT = {"up": "column", "down": "row"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"layout": Layout(Mesh(tensor=2), split=SPLIT)},
    "ZeRO": {"shard_optimizer": True},
    "pipeline": {"layout": Layout(Mesh(pipeline=2), stages=["down"])},
}


def dense(units: int = 8, dropout: float = 0.0) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    layers = keras.layers
    given = layers.Input((6,))
    up = layers.Dense(units, activation="relu", name="up")(given)
    down = layers.Dense(5, activation="relu", name="down")(layers.Dropout(dropout)(up))
    return keras.Model(given, layers.Dense(3, activation="softmax", name="out")(down))


def with_dropout(units: int) -> keras.Model:
    return dense(8, 0.3)


def of_layout(name: str, **options: Any) -> dict[str, Any]:
    """Options of `train`."""
    return {"network": dense, "units": 8, "best_weights": False, **LAYOUTS[name], **options}


def far_from(run_dir: Path, expected: Path, left: dict[str, Any], other: dict[str, Any]) -> Any:
    """The largest differences of the weights and of the History, and of what callbacks counted."""
    models = [keras.saving.load_model(one / "model.keras") for one in (run_dir, expected)]
    pairs = zip(*(model.get_weights() for model in models), strict=True)
    weights = max(float(np.max(np.abs(a - b))) for a, b in pairs)
    ours, theirs = left["history"], other["history"]
    history = max(float(np.max(np.abs(np.subtract(ours[k], theirs[k])))) for k in theirs)
    return {"weights": weights, "history": history, "batches": left["batches"]}


def case_other_layouts() -> Any:
    """One after the other, each ended within an epoch, where gradients wait."""
    expected, run_dir = folder(), folder()
    other = train(expected, "accumulation", None, **of_layout("data"))
    order = ("data", "tensor", "ZeRO", "pipeline", "data")
    for name in order[:-1]:
        assert train(run_dir, "accumulation", 1, STEPS + 1, **of_layout(name)) is None
    left = train(run_dir, "accumulation", 1, **of_layout(order[-1]))
    assert left is not None and other is not None
    return far_from(run_dir, expected, left, other) | {"all": EPOCHS * STEPS}


def case_best_weights() -> str:
    run_dir = folder()
    train(run_dir, epochs=2, **of_layout("tensor", best_weights=True))
    return refusal(run_dir, **of_layout("data", best_weights=True))


def case_other_numbers() -> Any:
    """One of several jobs, of another number of ranks each; the last one compares."""
    run_dir = Path(os.environ["RESUMED_RUN_DIR"])
    end_at = int(os.environ["RESUMED_END_AT"])
    options = of_layout("data", source="PyDataset")
    left = train(run_dir, "accumulation", 1, end_at, **options)
    if end_at:
        return left
    expected = folder()
    other = train(expected, "accumulation", None, **options)
    assert left is not None and other is not None
    return far_from(run_dir, expected, left, other) | {"all": EPOCHS * STEPS}
