"""Inspects the graph of a tf.data pipeline: whether its elements are batches, and where its shard point is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.data import structures
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.data.sharding import ShardPoint

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
# Their elements come from a function that makes datasets, or are whatever was passed.
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
ONE_TO_ONE = {
    "_BatchDataset",
    "_MapDataset",
    "_OptionsDataset",
    "_ParallelBatchDataset",
    "_ParallelMapDataset",
    "_PrefetchDataset",
    "_UnbatchDataset",
}
"""Operations that may follow a shard point: they pass on all examples, in order."""

AT_ONCE = (
    ONE_TO_ONE
    | UNBATCHING
    | {
        "_FilterDataset",
        "_PaddedBatchDataset",
        "_RebatchDataset",
        "_ShuffleDataset",
        "_TensorDataset",
        "_ZipDataset",
    }
)
"""Operations whose iterator opens those of its inputs as soon as it is created.

Randomness enters only there: an order is drawn for each iterator, whether it is read or not.
"""

DRAWING = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}
"""TensorFlow operations that draw random numbers from a counter of their own."""
COUNTING = DRAWING | {
    "AssignAddVariableOp",
    "AssignVariableOp",
    "RngReadAndSkip",
}
"""Operations whose results depend on how often they ran: also those of tf.random.Generator and of Keras's layers."""

POINT = "hvdtrain_shard_point"
"""Attribute of the Dataset that is a shard point."""


def is_batched(dataset: Any, input_ranks: Sequence[int] | None = None) -> bool:
    """Whether a Dataset's elements are batches.

    The last operation in the pipeline that makes or undoes batches decides. If there is none (the elements come from a
    generator or an interleave), a scalar is not a batch, nor are parts of different lengths; then `input_ranks`
    decides. If that is unknown they are batches, as in Keras.

    Args:
        dataset: A tf.data.Dataset.
        input_ranks: Number of dimensions of each of the model's inputs, with the batch dimension (`len(input.shape)`).
    """
    by_pipeline = batched_by_pipeline(dataset)
    if by_pipeline is not None:
        return by_pipeline
    data = as_tuple(dataset.element_spec)
    shapes = [leaf.shape for _, leaf in structures.named_parts(data)]
    leading = {shape[0] for shape in shapes if shape.rank} - {None}
    if any(shape.rank == 0 for shape in shapes) or len(leading) > 1:
        return False
    inputs = [leaf.shape.rank for _, leaf in structures.named_leaves(data[0], "x")]
    if input_ranks is None or len(inputs) != len(input_ranks) or None in inputs:
        return True
    differences = {wanted - rank for rank, wanted in zip(inputs, input_ranks, strict=True)}
    return differences != {1}


def find_point(dataset: Any) -> ShardPoint | None:
    """Return the shard point of a pipeline, if it has one.

    Raises:
        UsageError: If an operation that may drop, repeat or reorder examples follows it.
    """
    point = getattr(dataset, POINT, None)
    if point is not None:
        return point
    found = [find_point(source) for source in dataset._inputs()]
    point = next((point for point in found if point is not None), None)
    if point is None:
        return None
    operation = type(dataset).__name__.removeprefix("_").removesuffix("Dataset")
    if type(dataset).__name__ not in ONE_TO_ONE:
        raise UsageError(
            f"in the tf.data.Dataset, {operation} comes after hvdtrain.data.shard, where only map, batch, unbatch and "
            "prefetch are allowed: put shard after it."
        )
    if bool(getattr(dataset, "_drop_remainder", False)):
        raise UsageError(
            f"in the tf.data.Dataset, {operation} with drop_remainder=True comes after hvdtrain.data.shard, where it "
            "would drop different examples on each rank: leave it out. To drop the rest, use take(n) before shard."
        )
    return point


def batched_by_pipeline(dataset: Any) -> bool | None:
    """Whether the last operation that makes or undoes batches makes them; None if there is none."""
    name = type(dataset).__name__
    if hasattr(dataset, POINT):
        return False
    if name in BATCHING or name in UNBATCHING:
        return name in BATCHING
    if name in OPAQUE:
        return None
    answers = {batched_by_pipeline(source) for source in dataset._inputs()}
    return answers.pop() if len(answers) == 1 else None


def opens_at_once(dataset: Any) -> bool:
    """Whether creating an iterator affects later passes as reading a whole pass does."""
    return type(dataset).__name__ in AT_ONCE and all(map(opens_at_once, dataset._inputs()))


def unrepeatable(dataset: Any) -> str:
    """Return why another process may read other data or another order, as far as the graph shows; "" if it cannot."""
    operation = type(dataset).__name__.removeprefix("_").removesuffix("Dataset")
    here = f"in the tf.data.Dataset, {operation}"
    if _is_unseeded(getattr(dataset, "_seed", None), getattr(dataset, "_seed2", None)):
        return f"{here} has no seed: set one (seed=1), or create the Dataset after hvdtrain.init(seed=1)"
    if getattr(dataset, "_deterministic", None) == "false":
        return f"{here} has deterministic=False, so the order differs from run to run: leave it out"
    parallel = getattr(dataset, "_num_parallel_calls", None) is not None
    for node in operations_of(dataset):
        if parallel and node.op in COUNTING:
            return (
                f"{here} draws random numbers ({node.op}) in several threads at once: leave num_parallel_calls "
                "out, or use the functions of tf.random that begin with stateless_"
            )
        if node.op in DRAWING and _is_unseeded(node.attr["seed"].i, node.attr["seed2"].i):
            return f"{here} draws random numbers without a seed ({node.op}): set one"
    return next(filter(None, map(unrepeatable, dataset._inputs())), "")


def _is_unseeded(*seeds: Any) -> bool:
    """Whether TensorFlow replaces these two seeds by random ones."""
    return None not in seeds and not any(map(int, seeds))


def operations_of(dataset: Any) -> Iterator[Any]:
    """Yield the TensorFlow operations (NodeDef) in the functions of a Dataset, without those of its inputs."""
    for function in dataset._functions():
        yield from nodes_of(function.function.graph)


def nodes_of_all(dataset: Any) -> Iterator[Any]:
    """Yield the operations of a Dataset and of its inputs."""
    yield from operations_of(dataset)
    for source in dataset._inputs():
        yield from nodes_of_all(source)


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield the operations (NodeDef) of a FuncGraph and of the functions that it calls."""
    definition = graph.as_graph_def()
    yield from definition.node
    for inner in definition.library.function:
        yield from inner.node_def


def as_tuple(element: Any) -> tuple:
    """Return a Dataset's element as a data tuple."""
    return element if isinstance(element, tuple) else (element,)
