"""Losses of parts of a batch, each times its share: together the loss of the whole batch. No ranks."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from thread_ranks import thread_ranks

from hvdtrain.collectives.step_context import Step, Total, in_step
from hvdtrain.keras_internals import graph as graph_internals
from hvdtrain.keras_internals.compiled_losses import (
    build_compiled,
    compiled_loss,
    compute_loss,
    needs_whole_batch,
)
from hvdtrain.strategies import losses
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
        graph_internals.give_mask(tensor, tf.constant(MASK[rows]))
    return tensor


class Ignoring(keras.losses.Loss):
    """Leaves entries out by itself, as Keras's losses do with ignore_class."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        values = keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
        graph_internals.give_mask(values, y_true[..., 0] > -0.3)
        return values


def compiled(loss: Any, shape: tuple[int | None, ...] = (None, 4, 3)) -> keras.Model:
    model = keras.Sequential([keras.layers.Input(shape[1:]), keras.layers.Dense(shape[-1])])
    model.compile(loss=loss)
    build_compiled(model, model.outputs[0], keras.KerasTensor(shape), None)
    return model


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", [keras.losses.MeanSquaredError, Ignoring])
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
def test_parts_add_up(reduction: str, kind: Any, masked: bool, weighted: bool) -> None:
    model = compiled(kind(reduction=reduction))
    weight = WEIGHT if weighted else None

    def loss(rows: slice) -> Any:
        part = None if weight is None else weight[rows]
        return compiled_loss(model, Y[rows], predicted(rows, masked), part, track=False)

    wanted = float(loss(slice(None)))
    make_exact(model)
    counted: list[Any] = []

    def count(divisor: tf.Tensor) -> tf.Tensor:
        counted.append(divisor)
        return divisor

    def added(total: Total) -> float:
        found = 0.0
        for begin, end in PARTS:
            share = tf.constant((end - begin) / EXAMPLES)
            with in_step(Step(share, total, share_in_loss=True)):
                found += float(loss(slice(begin, end)) * share)
        return found

    # First all parts count, then each knows the total.
    added(count)
    assert len(counted) in (0, len(PARTS))
    assert added(lambda _: tf.add_n(counted)) == pytest.approx(wanted, rel=1e-5)
    # A filler counts nothing and adds nothing.
    counted.clear()
    with in_step(Step(tf.constant(0.0), count, share_in_loss=True)):
        assert float(loss(slice(0, 3)) * 0.0) == 0.0
    assert [float(one) for one in counted] in ([], [0.0])
    # And outside of a step it is Keras's loss again, of its own class.
    assert float(loss(slice(None))) == wanted


def test_a_loss_without_reduction_is_the_sum_of_its_entries() -> None:
    """Masked ones count nothing, and nothing is divided by the others."""
    model = compiled(keras.losses.MeanSquaredError(reduction=None))

    def gradient(rows: slice, share: float) -> np.ndarray:
        tensor = predicted(rows, masked=True)
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = compute_loss(model, Y[rows], tensor, None, training=False)
            loss *= share
        return tape.gradient(loss, tensor).numpy()

    wanted = gradient(slice(None), 1.0)
    make_exact(model)
    found = []
    for begin, end in PARTS:
        share = (end - begin) / EXAMPLES
        with in_step(Step(share, lambda divisor: 2 * divisor, share_in_loss=True)):
            found.append(gradient(slice(begin, end), share))
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-6)


def test_losses_that_need_the_whole_batch() -> None:
    images = (None, 4, 4, 3)
    refused: dict[str, tuple[Any, tuple[int | None, ...]]] = {
        "is computed from sums over all examples": (keras.losses.Dice(), images),
        "'tversky'": (keras.losses.Tversky(axis=(0, 1)), images),
        "'dice'": ("dice", images),
        "compares each example": (keras.losses.Circle(), (None, 4)),
    }
    for words, (loss, shape) in refused.items():
        complaint = needs_whole_batch(compiled(loss, shape))
        assert complaint is not None and words in complaint
    allowed = [keras.losses.Dice(axis=(1, 2, 3)), keras.losses.Tversky(axis=[1, 2, 3]), "mse"]
    for loss in allowed:
        assert needs_whole_batch(compiled(loss, images)) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_of_one_number_is_warned_of_once_on_rank_0(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compiled(lambda y_true, y_pred: keras.ops.mean(keras.ops.square(y_true - y_pred)))
    monkeypatch.setattr(losses, "ALL_RANKS", thread_ranks(2)[rank])
    make_exact(model)
    step = Step(tf.constant(0.5), lambda divisor: divisor, share_in_loss=True)
    with warnings.catch_warnings(record=True) as seen, in_step(step):
        warnings.simplefilter("always")
        for _ in range(2):
            compiled_loss(model, Y, tf.constant(PREDICTED), None, track=False)
    messages = [str(one.message) for one in seen]
    assert len(messages) == (1 if rank == 0 else 0)
    assert all("is treated as a mean over the examples" in message for message in messages)
