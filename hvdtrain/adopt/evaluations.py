"""Which examples a script evaluates on, and whether the size of the batches makes a difference.

Keras averages what the loss and the metrics find in each batch. For means over examples, batches of any size give the
same; for the rest, a Trainer must evaluate with the batches of the script.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.adopt.batches import batch_examples
from hvdtrain.data.arrays import convert, unpack
from hvdtrain.data.structures import count_examples, cut
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.compiled_losses import compiled_losses, own_losses
from hvdtrain.keras_internals.metric_calls import is_known_to_add_up, metrics_of
from hvdtrain.keras_internals.models import overridden


def evaluation_batch(data: Any, batch_size: int | None, steps: int | None) -> int:
    """Return the number of examples in a batch of `data`, as `batch_examples`; 0 if it is not known without reading."""
    if isinstance(data, Iterator | keras.utils.PyDataset):
        return 0
    try:
        return batch_examples(data, batch_size, steps)[0]
    except UsageError:
        return 0


def first_batches(data: Any, steps: int | None, batch_size: int) -> Any:
    """Return the data that Keras evaluates on in a number of steps.

    Args:
        data: Arrays, or a tuple (x[, y[, sample_weight]]) of them; or data in batches of its own.
        steps: Number of batches of the script; None: all.
        batch_size: Their size, if the data is arrays.

    Raises:
        UsageError: The data cannot be divided without reading it.
    """
    if steps is None:
        return data
    if isinstance(data, tf.data.Dataset):
        return data.take(steps)
    if isinstance(data, Iterator | keras.utils.PyDataset):
        raise UsageError("the number of steps of the evaluation counts batches of another size")
    return cut(convert(unpack(data)), 0, steps * batch_size)


def reads_a_part(data: Any, batch_size: int, steps: int | None) -> bool:
    """Whether `steps` batches may be less than all of the data."""
    if steps is None:
        return False
    if isinstance(data, tf.data.Dataset):
        return not 0 <= int(data.cardinality()) <= steps
    return count_examples(convert(unpack(data)), "the data") > steps * batch_size


def depends_on_batches(model: keras.Model) -> str:
    """Return what in an evaluation of a built model depends on the size of the batches; "" if nothing is known to."""
    if own := overridden(model, "compute_loss", "compute_metrics", "test_step"):
        return f"its {own}"
    losses = compiled_losses(model)
    # Keras gives a smaller last batch the same weight in the averages of their losses.
    if len(losses) > 1:
        return "the average of its losses"
    by_batch = [one.name for one in losses if one.reduction != "sum_over_batch_size"]
    metrics = [
        one.name for one in metrics_of(model) if not is_known_to_add_up(one) and one.name != "loss"
    ]
    return next((repr(name) for name in [*by_batch, *own_losses(model), *metrics]), "")
