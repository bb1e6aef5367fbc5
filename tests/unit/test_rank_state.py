"""What each rank has of its own: seeds, and its part of gradients that wait for an update. No ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import pytest

from hvdtrain.collectives.gradient_accumulation import divided_accumulators
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.collectives.statistics import fold_rank_into_seeds
from hvdtrain.keras_internals.variables import seed_variables

RANKS = 4


def test_every_rank_has_seeds_of_its_own_and_the_first_keeps_them() -> None:
    model = keras.Sequential([keras.layers.Dropout(0.5, seed=3), keras.layers.Dropout(0.5, seed=4)])
    before = [variable.numpy().tolist() for variable in seed_variables(model)]
    found = []
    for rank in range(RANKS):
        for variable, value in zip(seed_variables(model), before, strict=True):
            variable.assign(value)
        fold_rank_into_seeds(model, rank)
        found.append([variable.numpy().tolist() for variable in seed_variables(model)])
    assert found[0] == before
    assert len({str(seeds) for seeds in found}) == RANKS


@pytest.mark.parametrize("adds_up", [True, False])
def test_parts_of_waiting_gradients_make_them_up(adds_up: bool) -> None:
    ranks: Any = SimpleNamespace(size=lambda: RANKS)
    total = RANKS * divided_accumulators(6.0, Reduction(process_set=ranks, weighted=adds_up))
    assert (total if adds_up else total / RANKS) == 6.0
