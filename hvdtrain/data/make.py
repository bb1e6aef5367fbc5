"""Turns the data that a user passes to fit into a `Source`."""

import os
from collections.abc import Mapping
from typing import Any

from hvdtrain.data import arrays, iterables, tf_dataset
from hvdtrain.data.files import Files, file_source
from hvdtrain.data.py_dataset import Items, is_py_dataset, py_dataset_source, py_dataset_stream
from hvdtrain.data.share import ReadOptions, Source
from hvdtrain.data.streams import Stream, StreamSource
from hvdtrain.errors import UsageError, require_integer

ACCEPTED = (
    "NumPy arrays, tensors, DataFrames or lists of numbers (alone, or nested in lists and dicts), "
    "a tf.data.Dataset, files (hvdtrain.data.from_files), a keras.utils.PyDataset, or a Python "
    "generator or iterable of batches"
)


def make_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    global_batch_size: int,
    shuffle: bool,
    seed: int,
    steps_per_epoch: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    training: bool = True,
    batched: bool | None = None,
    threads: int | None = None,
) -> Source:
    """Return the `Source` of any data that Keras's fit accepts, except the loaders of other libraries.

    What each rank reads:

    - arrays: its own rows. Arrays on disk (np.memmap, h5py) stay there; scipy.sparse is made dense one share at a time.
    - files (`from_files`): its own examples.
    - a PyDataset: the items that hold its examples. That is its part of them if an item has no more than
      global_batch_size / workers examples, and all of them if an item is a whole global batch.
    - a tf.data.Dataset, a generator: all of it, in an order that must be the same on every rank (pass a seed to
      `Dataset.shuffle`). After `Dataset.apply(hvdtrain.data.shard)` each rank continues with its own examples only.

    The batches of a Dataset, PyDataset or generator are used as global batches if the first one has `global_batch_size`
    examples, or if the lengths of examples vary (padded_batch, bucket_by_sequence_length: the element_spec contains
    None, or the first two batches differ in shape). Otherwise they are rebatched to that size.

    Floating-point data is converted to Keras's floatx, as Keras does with arrays.

    Args:
        x: Arrays (a tuple is (x, y) or (x, y, sample_weight), a list is several inputs), a tf.data.Dataset, files, a
            PyDataset, an iterator or iterable of batches (x[, y[, sample_weight]]), or a function without arguments
            that returns an iterable of batches and is called for each pass.
        y: Labels, if `x` is arrays.
        sample_weight: Weights of the examples, if `x` is arrays.
        global_batch_size: Number of examples per step, over all workers.
        shuffle: Whether to shuffle, by seed and pass: arrays and files by example, a PyDataset by item. Other data
            keeps its order.
        seed: Seed of the shuffling.
        steps_per_epoch: Number of global batches per epoch; the next epoch continues where the last one stopped. An
            epoch that reaches the end of the data ends there, and the next one starts a new pass.
        class_weight: Weight of each class, by its number; a class that is missing has weight 1. Multiplied with sample
            weights.
        training: Whether the data is for training; if so, warn when the steps differ from the user's own batches.
        batched: Whether the elements of a Dataset are batches; None: detect it (`is_batched`).
        threads: Number of tf.data's threads; None: the CPU cores that this process may use.

    Raises:
        UsageError: If the data or an argument cannot work; raised before anything is read, where possible.
    """
    require_integer("global_batch_size", global_batch_size)
    if steps_per_epoch is not None:
        require_integer("steps_per_epoch", steps_per_epoch)
    steps = steps_per_epoch and int(steps_per_epoch)
    threads = threads or len(os.sched_getaffinity(0))
    reading = ReadOptions(
        int(global_batch_size), shuffle, seed, steps, class_weight, training, _floatx()
    )
    if x is None or arrays.is_arrays(x):
        return arrays.array_source(arrays.unpack(x, y, sample_weight), reading)
    if isinstance(x, Files):
        _refuse_beside("files of from_files", y, sample_weight)
        return file_source(x, reading, threads)
    stream: Stream
    if is_py_dataset(x):
        items = Items(x)
        _refuse_beside(f"a {items.name}", y, sample_weight)
        by_item = py_dataset_source(items, reading)
        if by_item is not None:
            return by_item
        stream = py_dataset_stream(items, reading)
    elif tf_dataset.is_dataset(x):
        stream = tf_dataset.dataset_stream(x, reading, batched=batched, threads=threads)
    elif iterables.is_readable(x):
        stream = iterables.python_stream(x, float_dtype=reading.float_dtype)
    else:
        raise UsageError(
            f"x is a {type(x).__module__}.{type(x).__name__}, which cannot be read as training "
            f"data. Pass {ACCEPTED}."
        )
    _refuse_beside(f"a {stream.name}", y, sample_weight)
    if stream.endless and not steps:
        raise UsageError(f"the {stream.name} never ends: pass steps_per_epoch.")
    return StreamSource(stream, reading)


def _refuse_beside(what: str, y: Any, sample_weight: Any) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise UsageError(
                f"{name} was passed together with {what}, which provides its own: (x, y) or (x, y, "
                "sample_weight)."
            )


def _floatx() -> str:
    from keras.config import floatx

    return str(floatx())
