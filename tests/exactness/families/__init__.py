"""All cases of the table, family by family."""

from __future__ import annotations

from exactness.case import Case
from exactness.families import data, layers, losses, metrics, optimizers, steps, surroundings

CASES: tuple[Case, ...] = (
    *losses.CASES,
    *optimizers.CASES,
    *steps.CASES,
    *data.CASES,
    *surroundings.CASES,
    *metrics.CASES,
    *layers.CASES,
)
