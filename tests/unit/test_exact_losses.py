"""Losses of parts of a batch, each times its share: together the loss of the whole batch. No ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.keras.compat import graph as compat_graph
from hvdtrain.strategies.losses import make_exact

EXAMPLES = 12
PARTS = ((0, 1), (1, 6), (6, 12))
RNG = np.random.default_rng(1)
Y, PREDICTED = RNG.normal(size=(2, EXAMPLES, 4, 3)).astype("float32")
WEIGHT = RNG.uniform(0.1, 5, (EXAMPLES, 4)).astype("float32")
MASK = RNG.random((EXAMPLES, 4)) < 0.4
MASK[:1] = False
"""The first part has no unmasked entry."""


def predicted(rows: slice, masked: bool) -> tf.Tensor:
    tensor = tf.constant(PREDICTED[rows])
    if masked:
        compat_graph.give_mask(tensor, tf.constant(MASK[rows]))
    return tensor


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
def test_parts_add_up(reduction: str, masked: bool, weighted: bool) -> None:
    model = keras.Sequential([keras.layers.Input((4, 3)), keras.layers.Dense(3)])
    model.compile(loss=keras.losses.MeanSquaredError(reduction=reduction))
    compat_graph.build_compiled(model, model.outputs[0], keras.KerasTensor((None, 4, 3)), None)
    weight = WEIGHT if weighted else None

    def loss(rows: slice) -> Any:
        part = None if weight is None else weight[rows]
        return compat_graph.compiled_loss(
            model, Y[rows], predicted(rows, masked), part, track=False
        )

    wanted = float(loss(slice(None)))
    reducer = SimpleNamespace(share=None)
    counted: list[Any] = []

    def count(divisor: tf.Tensor) -> tf.Tensor:
        counted.append(divisor)
        return divisor

    total = 0.0
    # First all parts count, then each knows the total.
    for phase in ("count", "use"):
        known = tf.add_n(counted) if counted else None
        make_exact(model, reducer, count if phase == "count" else lambda _, known=known: known)
        total = 0.0
        for begin, end in PARTS:
            reducer.share = tf.constant((end - begin) / EXAMPLES)
            total += float(loss(slice(begin, end)) * reducer.share)
    assert len(counted) in (0, len(PARTS))
    assert total == pytest.approx(wanted, rel=1e-5)
    # A filler counts nothing and adds nothing.
    counted.clear()
    make_exact(model, reducer, count)
    reducer.share = tf.constant(0.0)
    assert float(loss(slice(0, 3)) * reducer.share) == 0.0
    assert [float(one) for one in counted] in ([], [0.0])
    # And without a share it is Keras's loss again, of its own class.
    reducer.share = None
    assert float(loss(slice(None))) == wanted
