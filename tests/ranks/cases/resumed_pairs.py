"""Fits that are ended and resumed: each pair of optimizer, what else the course depends on, data, place and layout."""

from __future__ import annotations

import itertools
import os
from typing import Any

import keras
from checkpoints import STEPS, ended_and_resumed
from resumed_layouts import LAYOUTS, dense, of_layout, with_dropout

LEVELS = 5
OPTIMIZERS = ("momentum", "adam", "averages", "loss scaling", "accumulation")
COURSES = ("dropout", "plateau", "early stopping", "schedule", "warm-up")
DATA = ("arrays", "PyDataset", "files", "tf.data")
PLACES = {
    "first step": (1, 2),
    "mid-epoch": (3, STEPS + 5),
    "last step": (1, 2 * STEPS),
    "epoch end": (1000, STEPS + 2),
}
"""Steps between checkpoints, and the step in which the fit ends, before it is saved."""


def rows() -> list[tuple[str, ...]]:
    """Return 25 rows in which any two columns have all pairs: the orthogonal array of a field of 5 elements.

    Column k of row (i, j) is i + k j, one more is j; what has four levels uses the first one twice.
    """
    tables = (tuple(DATA), tuple(PLACES), tuple(LAYOUTS))
    found = []
    for i, j in itertools.product(range(LEVELS), repeat=2):
        others = [table[(i + k * j) % LEVELS % len(table)] for k, table in enumerate(tables, 1)]
        found.append((OPTIMIZERS[i], COURSES[j], *others))
    return found


def of_course(course: str) -> dict[str, Any]:
    """Options of `train`."""
    rate = (
        keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.8) if course == "schedule" else 0.02
    )
    return {
        "network": with_dropout if course == "dropout" else dense,
        "plateau": course == "plateau",
        "best_weights": course == "early stopping",
        "rate": rate,
        "warmup_epochs": 2 if course == "warm-up" else 0,
        # A Dataset's length, which warm-up asks for, is not known to the Trainer.
        "steps": STEPS if course == "warm-up" else None,
    }


def case_rows() -> dict[str, list[str]]:
    found = {}
    for optimizer, course, source, place, layout in rows()[:: int(os.environ["RESUMED_EVERY"])]:
        every, end = PLACES[place]
        options = of_layout(layout, source=source, epochs=3, **of_course(course))
        name = ", ".join((optimizer, course, source, place, layout))
        found[name] = ended_and_resumed(optimizer, every, [end], **options)
    return found
