"""tf.data.Dataset as a `Stream`.

The pipeline's parallelism is the user's; its thread pool is ours: as many threads as the rank has cores, and no
autotuning, whose extra threads take the cores of neighbouring ranks (two ranks on two cores trained twice as fast
without).
"""

import re
from collections.abc import Iterator
from typing import Any

from hvdtrain.data import structures
from hvdtrain.data.share import ReadOptions
from hvdtrain.data.streams import Stream
from hvdtrain.data.tf_data_graph import (
    as_tuple,
    find_point,
    is_batched,
    opens_at_once,
    unrepeatable,
)
from hvdtrain.errors import UsageError

OF_A_CACHE = re.compile(r"([^\s']+)_\d+\.(?:lockfile|data-\S+tempstate)")
"""Name of a file that Dataset.cache writes, in an error of TensorFlow; the first group is the user's name of it."""
FLOATS = ("float16", "float32", "float64")


def is_dataset(value: Any) -> bool:
    """Whether `value` is a tf.data.Dataset; does not import TensorFlow."""
    return any(
        cls.__name__ == "DatasetV2" and cls.__module__.startswith("tensorflow.")
        for cls in type(value).__mro__
    )


def dataset_stream(
    dataset: Any, reading: ReadOptions, *, batched: bool | None, threads: int
) -> Stream:
    """Return the stream of a Dataset: its batches, or its examples in global batches, as arrays that share its memory.

    Args:
        dataset: A tf.data.Dataset.
        reading: Settings of the reading.
        batched: Whether its elements are batches; None: detect it (`is_batched`).
        threads: Number of tf.data's threads.

    Raises:
        UsageError: If elements are not dense, or a wrong operation follows its shard point.
    """
    import tensorflow as tf

    require_dense(dataset, "the tf.data.Dataset")
    batched = is_batched(dataset) if batched is None else batched
    point = find_point(dataset)
    length = int(dataset.cardinality()) if point is None else point.length
    if not batched:
        dataset = dataset.batch(reading.global_batch_size)
    dataset = dataset.with_options(options_of(dataset, threads))
    known = length >= 0 and not (batched and point is None)

    # Keras creates two iterators of a Dataset of known length per epoch, if an epoch is a pass. So do we, so that a
    # Dataset that shuffles anew for each iterator comes in the same orders.
    twice = length >= 0 and not reading.steps

    def read_pass(number: int) -> Iterator[Any]:
        yield from read(dataset)
        if twice:
            iter(dataset)

    def skip(passes: int) -> None:
        for _ in range(passes * (2 if twice else 1)):
            iter(dataset)

    return Stream(
        name="tf.data.Dataset",
        open=read_pass,
        element=lambda: element_of(dataset, reading.float_dtype),
        endless=length == tf.data.INFINITE_CARDINALITY,
        steps=-(-length // reading.global_batch_size) if known else None,
        examples=length if known else None,
        point=point,
        skip=skip if opens_at_once(dataset) else None,
        unrepeatable=unrepeatable(dataset),
    )


def require_dense(dataset: Any, what: str) -> None:
    """Raise UsageError unless all elements are dense tensors of a known number of dimensions."""
    import tensorflow as tf

    for name, leaf in structures.named_parts(as_tuple(dataset.element_spec)):
        if not isinstance(leaf, tf.TensorSpec):
            raise UsageError(
                f"{what} yields a {type(leaf).__name__.removesuffix('Spec')} as {name}; only dense "
                "tensors can be divided among workers. Call to_tensor or to_dense in it."
            )
        if leaf.shape.rank is None:
            raise UsageError(
                f"{what} yields {name} with an unknown number of dimensions, as after tf.py_function or "
                "tf.numpy_function: call tensor.set_shape(...) in the function that creates it."
            )


def element_of(dataset: Any, float_dtype: str) -> Any:
    """Return the signature of one example of a Dataset of batches, in the Dataset's structure."""

    def spec(leaf: Any) -> structures.Spec:
        dtype = float_dtype if leaf.dtype.name in FLOATS else leaf.dtype.name
        return structures.Spec(tuple(leaf.shape[1:]), dtype)

    return structures.map_leaves(spec, dataset.element_spec)


def read(dataset: Any) -> Iterator[Any]:
    """Yield the elements of a Dataset, with NumPy arrays as leaves.

    Raises:
        UsageError: If the Dataset caches in a file that another process writes, or wrote when it was killed.
    """
    import tensorflow as tf

    try:
        for element in dataset:
            yield structures.map_leaves(lambda tensor: tensor.__array__(), element)
    except (tf.errors.AlreadyExistsError, tf.errors.NotFoundError) as error:
        found = OF_A_CACHE.search(error.message)
        if found is None:
            raise
        raise UsageError(
            f"the tf.data.Dataset caches in the file {found[1]}, which another process writes, or wrote when it was "
            "killed. Workers cannot write one file together: use cache() without a file name, or put the rank into "
            f"it. If no process writes it any more, remove {found[1]}*"
        ) from error


def options_of(dataset: Any, threads: int) -> Any:
    """Return the options that the user left open, and a deterministic order, as all ranks must read the same."""
    import tensorflow as tf

    options = tf.data.Options()
    options.deterministic = True
    if dataset.options().autotune.enabled is None:
        options.autotune.enabled = False
    if dataset.options().threading.private_threadpool_size is None:
        options.threading.private_threadpool_size = threads
    return options
