"""Which elements of a variable a rank's part has; state's names."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.collectives.packing import bounded_groups
from hvdtrain.errors import UsageError
from hvdtrain.parallel.zero import gathered_state, scatter_state, state_names
from hvdtrain.parallel.zero.partition import Partition


@given(st.lists(st.integers(0, 7), max_size=3), st.integers(1, 9))
def test_parts_are_the_variable_once_and_of_nearly_one_size(shape: list[int], count: int) -> None:
    parts = [Partition(tuple(shape), index, count) for index in range(count)]
    flat = np.arange(np.prod(shape, dtype=int))
    assert np.concatenate([part.of(flat) for part in parts]).tolist() == flat.tolist()
    sizes = [part.size for part in parts]
    assert [len(part.of(flat)) for part in parts] == sizes
    # Horovod's reducescatter gives the longer ones to the first ranks.
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def built(name: str) -> keras.optimizers.Optimizer:
    variables = [keras.Variable(np.ones((2, 3)), name="kernel"), keras.Variable(1.0, name="kernel")]
    optimizer = keras.optimizers.Nadam(1e-3, name=name)
    optimizer.build(variables)
    return optimizer


def test_names_do_not_depend_on_the_optimizer_s_own() -> None:
    assert state_names(built("one")) == state_names(built("two"))
    assert state_names(built("one")) == [
        *("iteration", "learning_rate", "kernel_momentum", "kernel_velocity"),
        *("kernel_momentum#2", "kernel_velocity#2", "variable_6"),
    ]


def test_state_of_plain_optimizers_moves() -> None:
    first, second = built("one"), built("two")
    first.apply([np.full((2, 3), 2.0), 1.0])
    scatter_state(second, gathered_state(first))
    found = [np.asarray(v).tolist() for v in gathered_state(second).values()]
    assert found == [v.numpy().tolist() for v in first.variables]
    assert found[0] == 1


def test_state_that_does_not_fit() -> None:
    optimizer = built("one")
    state = gathered_state(optimizer)
    with pytest.raises(UsageError, match="lacks 'variable_6'"):
        scatter_state(optimizer, {n: v for n, v in state.items() if n != "variable_6"})
    with pytest.raises(
        UsageError, match=r"'kernel_momentum' has shape \(6,\), the variable \(2, 3\)"
    ):
        scatter_state(optimizer, state | {"kernel_momentum": np.zeros(6)})


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([9], [[9]]),
        ([2, 2, 1, 3, 2], [[2, 2, 1], [3, 2]]),
        ([1, 9, 1, 1], [[1], [9], [1, 1]]),
    ],
)
def test_what_travels_together_is_bounded(sizes: list[int], groups: list[list[int]]) -> None:
    assert bounded_groups(sizes, int, 5) == groups
