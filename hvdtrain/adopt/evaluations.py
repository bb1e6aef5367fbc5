"""Which examples a script evaluates on, and whether the size of the batches makes a difference.

Keras averages what the loss and the metrics find in each batch. For means over examples, batches of any size give the
same; for the rest, a Trainer must evaluate with the batches of the script.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.adopt.batches import batch_examples
from hvdtrain.adopt.keras_order import KerasItems
from hvdtrain.data.arrays import convert, unpack
from hvdtrain.data.structures import count_examples, cut
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.compiled_losses import compiled_losses, own_losses
from hvdtrain.keras_internals.metric_calls import is_known_to_add_up, metrics_of
from hvdtrain.keras_internals.models import overridden


@dataclass(frozen=True)
class Evaluation:
    """What a script evaluates on.

    Attributes:
        data: As much of the data as Keras reads.
        batch: Number of examples in a batch of the script; 0 if it is not known without reading.
        is_part: Whether this may be less than all of the data.
    """

    data: Any
    batch: int = 0
    is_part: bool = False

    @classmethod
    def of(cls, data: Any, batch_size: int | None, steps: int | None) -> Evaluation:
        """Return the evaluation on `data` with these arguments of Keras's evaluate.

        Args:
            data: Arrays, or a tuple (x[, y[, sample_weight]]) of them; or data in batches of its own.
            batch_size: Number of examples in a batch, if the script gives it.
            steps: Number of batches; None: all.

        Raises:
            UsageError: The data cannot be divided without reading it.
        """
        batch = _batch(data, batch_size, steps)
        if steps is None:
            is_items = isinstance(data, keras.utils.PyDataset)
            return cls(KerasItems(data, False) if is_items else data, batch)
        if isinstance(data, tf.data.Dataset):
            return cls(data.take(steps), batch, not 0 <= int(data.cardinality()) <= steps)
        if isinstance(data, Iterator | keras.utils.PyDataset):
            raise UsageError("the number of steps of the evaluation counts batches of another size")
        arrays = convert(unpack(data))
        examples = steps * batch
        return cls(cut(arrays, 0, examples), batch, count_examples(arrays, "the data") > examples)

    def unlike(self, model: keras.Model, size: int) -> str:
        """Return why validations in batches of `size` differ from the script's, to be told; "" if they do not.

        Raises:
            UsageError: They would differ by the ratio of the batches.
        """
        why = ""
        if self.is_part:
            why = ". Each validation reads the same batches, where Keras goes on with the next ones"
        if self.batch in (0, size):
            return why
        if name := _sum_of_batch(model):
            raise UsageError(
                f"the loss {name} adds up a batch, which has {self.batch} examples in the validation"
            )
        if cause := depends_on_batches(model):
            why += f". Validations are in batches of {size}, not {self.batch}, on which {cause} may depend"
        return why


def depends_on_batches(model: keras.Model) -> str:
    """Return what in an evaluation of a built model may depend on the size of the batches; "" if nothing does."""
    if own := overridden(model, "compute_loss", "compute_metrics", "test_step"):
        return f"its {own}"
    if len(compiled_losses(model)) > 1:
        # Keras gives a smaller last batch the same weight in their averages.
        return "the average of each of its losses"
    metrics = [one for one in metrics_of(model) if not is_known_to_add_up(one)]
    names = [*own_losses(model), *(one.name for one in metrics if one.name != "loss")]
    return _sum_of_batch(model) or next(map(repr, names), "")


def _sum_of_batch(model: keras.Model) -> str:
    """Return the name of a loss that is no mean over the examples of a batch; "" if all are."""
    losses = compiled_losses(model)
    return next((repr(one.name) for one in losses if one.reduction != "sum_over_batch_size"), "")


def _batch(data: Any, batch_size: int | None, steps: int | None) -> int:
    if data is None or isinstance(data, Iterator | keras.utils.PyDataset):
        return 0
    try:
        return batch_examples(data, batch_size, steps)[0]
    except UsageError:
        return 0
