"""tf.data.Dataset as a `Stream`.

The pipeline's parallelism is the user's, its thread pool is ours: one of the rank's own cores,
without autotuning, whose extra threads take the cores of neighbouring ranks (two ranks on two
cores trained twice as fast without).
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from hvdtrain.data import nested
from hvdtrain.data.streams import Stream
from hvdtrain.errors import UsageError

BATCHING = {
    "_BatchDataset",
    "_LegacyRebatchDataset",
    "_MapAndBatchDataset",
    "_PaddedBatchDataset",
    "_ParallelBatchDataset",
    "_RebatchDataset",
}
UNBATCHING = {
    "FixedLengthRecordDatasetV2",
    "TFRecordDatasetV2",
    "TextLineDatasetV2",
    "_RangeDataset",
    "_TensorSliceDataset",
    "_UnbatchDataset",
}
# Their elements come out of a function that makes datasets, or are whatever was given.
OPAQUE = {
    "_FlatMapDataset",
    "_GroupByWindowDataset",
    "_InterleaveDataset",
    "_ParallelInterleaveDataset",
    "_ScanDataset",
    "_TensorDataset",
    "_VariantDataset",
    "_WindowDataset",
}
FLOATS = ("float16", "float32", "float64")


def is_dataset(value: Any) -> bool:
    """Whether it is a tf.data.Dataset; TensorFlow is not imported to find out."""
    return any(
        cls.__name__ == "DatasetV2" and cls.__module__.startswith("tensorflow.")
        for cls in type(value).__mro__
    )


def is_batched(dataset: Any, input_ranks: Sequence[int] | None = None) -> bool | None:
    """Whether a Dataset's elements are batches; None if that cannot be told.

    The pipeline tells: the last operation that makes or undoes batches. Where it does not (elements
    that come from a generator or an interleave), a scalar is no batch, and `input_ranks` decides,
    the number of dimensions of each of the model's inputs with the batch dimension
    (`len(input.shape)`).
    """
    by_pipeline = _batched_by_pipeline(dataset)
    if by_pipeline is not None:
        return by_pipeline
    data = _as_tuple(dataset.element_spec)
    ranks = [leaf.shape.rank for _, leaf in nested.named_parts(data)]
    if 0 in ranks:
        return False
    inputs = [leaf.shape.rank for _, leaf in nested.named_leaves(data[0], "x")]
    if input_ranks is None or len(inputs) != len(input_ranks) or None in inputs:
        return None
    differences = {wanted - rank for rank, wanted in zip(inputs, input_ranks, strict=True)}
    return True if differences == {0} else False if differences == {1} else None


def dataset_stream(
    dataset: Any,
    *,
    global_batch_size: int,
    batched: bool | None,
    threads: int | None,
    float_dtype: str,
) -> Stream:
    """The Dataset's batches, or its examples in global batches, as arrays that share its memory."""
    import tensorflow as tf

    for name, leaf in nested.named_parts(_as_tuple(dataset.element_spec)):
        if not isinstance(leaf, tf.TensorSpec):
            raise UsageError(
                f"the tf.data.Dataset gives a {type(leaf).__name__.removesuffix('Spec')} as "
                f"{name}; only dense tensors can be divided among workers. Call to_tensor or "
                "to_dense in it."
            )
    batched = is_batched(dataset) if batched is None else batched
    if batched is None:
        raise UsageError(
            "whether the elements of the tf.data.Dataset are batches or single examples cannot be "
            "told from its pipeline: let it end with .batch(n), or with .unbatch() for single examples"
        )
    length = int(dataset.cardinality())
    if not batched:
        dataset = dataset.batch(global_batch_size)
    dataset = dataset.with_options(_options(dataset, threads))
    known = not batched and length >= 0

    def spec(leaf: Any) -> nested.Spec:
        dtype = float_dtype if leaf.dtype.name in FLOATS else leaf.dtype.name
        return nested.Spec(tuple(leaf.shape[1:]), dtype)

    return Stream(
        name="tf.data.Dataset",
        open=lambda number: _read(dataset),
        element=lambda: nested.map_leaves(spec, _as_tuple(dataset.element_spec)),
        endless=length == tf.data.INFINITE_CARDINALITY,
        steps=-(-length // global_batch_size) if known else None,
        examples=length if known else None,
    )


def _read(dataset: Any) -> Iterator[Any]:
    for element in dataset:
        yield nested.map_leaves(lambda tensor: tensor.__array__(), element)


def _options(dataset: Any, threads: int | None) -> Any:
    """Options that the user left open. The order is always deterministic: ranks must read alike."""
    import tensorflow as tf

    options = tf.data.Options()
    options.deterministic = True
    if dataset.options().autotune.enabled is None:
        options.autotune.enabled = False
    if dataset.options().threading.private_threadpool_size is None:
        options.threading.private_threadpool_size = threads or len(os.sched_getaffinity(0))
    return options


def _batched_by_pipeline(dataset: Any) -> bool | None:
    name = type(dataset).__name__
    if name in BATCHING or name in UNBATCHING:
        return name in BATCHING
    if name in OPAQUE:
        return None
    answers = {_batched_by_pipeline(source) for source in dataset._inputs()}
    return answers.pop() if len(answers) == 1 else None


def _as_tuple(element: Any) -> tuple:
    return element if isinstance(element, tuple) else (element,)
