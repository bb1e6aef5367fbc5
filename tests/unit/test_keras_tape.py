"""DistributedGradientTape: what it refuses, in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.errors import UsageError


@pytest.mark.parametrize("method", ["jacobian", "batch_jacobian"])
def test_a_jacobian_is_refused(method: str) -> None:
    hvdtrain.init()
    x = tf.Variable([[1.0, 2.0]])
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        y = x**2
    with pytest.raises(
        UsageError, match=rf"Tape\.{method}: .* plain tf\.GradientTape, .*allreduce"
    ):
        getattr(tape, method)(y, x)


def test_what_is_no_tape_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Expected a tf\.GradientTape, not Sequential"):
        hvd.DistributedGradientTape(keras.Sequential())  # type: ignore[arg-type]
