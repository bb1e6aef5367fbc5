"""Horovod's queries and collectives, with Horovod's names and signatures.

They are those of horovod.tensorflow.keras, and those that custom training loops import from horovod.tensorflow.

Unlike Horovod's, the collectives accept Keras variables and bfloat16, work inside a tf.function, and their gradients
are those of the sum of all ranks' losses (see differentiable.py). `init` configures the stall check, `allreduce`
supports `Compression.bf16`, and `broadcast_object` and `allgather_object` never unpickle the data they receive.

Inside a tf.function, use the result of a collective: TensorFlow prunes an operation whose result is not used, and the
other ranks would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from horovod.tensorflow import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from horovod.tensorflow import join as horovod_join
from horovod.tensorflow.mpi_ops import handle_average_backwards_compatibility

from hvdtrain.collectives.communicator import Communicator, ranks_of
from hvdtrain.collectives.compression import BF16Compressor, Compression
from hvdtrain.collectives.error_feedback import refuse_lossy
from hvdtrain.collectives.packing import as_one
from hvdtrain.collectives.placement import on_device
from hvdtrain.collectives.reduction import scaled
from hvdtrain.collectives.tensor_names import in_this_graph
from hvdtrain.errors import UsageError
from hvdtrain.keras import differentiable
from hvdtrain.keras.differentiable import Call
from hvdtrain.keras.fit import prepare_fit
from hvdtrain.keras_internals.corrections import prepare_keras
from hvdtrain.keras_internals.variables import tf_variable
from hvdtrain.runtime import start_horovod

# fmt: off
__all__ = [
    "Adasum", "Average", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set",
    "allgather", "allgather_object", "allreduce", "alltoall", "broadcast", "broadcast_object",
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set",
    "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "init", "is_homogeneous", "is_initialized", "join", "local_rank",
    "local_rank_op", "local_size", "local_size_op", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "process_set_included_op", "rank", "rank_op",
    "reducescatter", "remove_process_set", "rocm_built", "shutdown", "size", "size_op",
    "start_timeline", "stop_timeline",
]
# fmt: on


def init(*args: Any, **kwargs: Any) -> None:
    """Start Horovod in this process; do nothing if it has already been started.

    Args:
        args: Positional arguments of Horovod's init.
        kwargs: Keyword arguments of Horovod's init.

    Raises:
        EngineError: If Horovod is not installed or does not load.
        UsageError: If HVDTRAIN_HANG_TIMEOUT is invalid.
    """
    start_horovod(*args, **kwargs)
    prepare_keras()
    prepare_fit()


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
    *,
    device_dense: str = "",
    device_sparse: str = "",
    process_set: ProcessSet | None = None,
) -> Any:
    """Return `value` reduced over the ranks, in the shape of `value`.

    Args:
        value: A number, array, tensor, variable or tf.IndexedSlices, of the same shape and dtype on every rank.
        name: Name of the collective. Pass a different one to each if tf.functions that use collectives call each other.
        average: Deprecated form of `op`: True for Average, False for Sum.
        prescale_factor: Factor for the value, before the reduction.
        postscale_factor: Factor for the result.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        compression: `Compression.none`, `.fp16`, or `.bf16` (for Average and Sum).
        device_dense: Device for the reduction. Default: Horovod's choice.
        device_sparse: Device for the allgathers that reduce IndexedSlices.
        process_set: Ranks that take part. Default: all.

    Raises:
        UsageError: If `Compression.bf16` or IndexedSlices do not support this `op`, or `compression` needs a
            DistributedOptimizer.
    """
    op = handle_average_backwards_compatibility(op, average)
    call = _call("allreduce", name, process_set, op, compression, prescale_factor, postscale_factor)
    if isinstance(value, tf.IndexedSlices):
        _require_additive(call)
        return _reduce_slices(value, call, device_sparse)
    with on_device(device_dense):
        return differentiable.allreduce(_tensor(value), call)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return each of `tensors` reduced over the ranks, in one allreduce that waits until all of them are ready.

    Tensors of different dtypes form one group per dtype; IndexedSlices, and all tensors with op=Adasum, are reduced one
    by one. Other arguments as in allreduce.

    Args:
        tensors: Arrays, tensors, variables or tf.IndexedSlices; the same number, shapes and dtypes on every rank.
        ignore_name_scope: For compatibility with Horovod; names never include scopes here.

    Raises:
        UsageError: As in allreduce.
    """
    del ignore_name_scope
    op = handle_average_backwards_compatibility(op, average)
    call = _call(
        "grouped_allreduce", name, process_set, op, compression, prescale_factor, postscale_factor
    )

    def reduce(group: list[Any], call: Call) -> list[Any]:
        if isinstance(group[0], tf.IndexedSlices):
            return [_reduce_slices(group[0], call, device_sparse)]
        with on_device(device_dense):
            return as_one(group, lambda whole: differentiable.allreduce(whole, call))

    values = [t if isinstance(t, tf.IndexedSlices) else _tensor(t) for t in tensors]
    if any(isinstance(t, tf.IndexedSlices) for t in values):
        _require_additive(call)
    groups: dict[str, list[int]] = {}
    for place, tensor in enumerate(values):
        alone = isinstance(tensor, tf.IndexedSlices) or call.op == Adasum
        # The dtype's name, because TensorFlow's dtypes compare equal to small integers.
        groups.setdefault(str(place) if alone else tensor.dtype.name, []).append(place)
    result: list[Any] = [None] * len(values)
    # Numbered, not named by dtype: a dtype that differs between ranks must be an error, not another collective.
    for part, places in zip(_numbered(call, len(groups)), groups.values(), strict=True):
        for place, value in zip(places, reduce([values[p] for p in places], part), strict=True):
            result[place] = value
    return result


def allgather(
    value: Any, name: str | None = None, *, process_set: ProcessSet | None = None
) -> tf.Tensor:
    """Return the values of all ranks, concatenated along the first dimension.

    Args:
        value: An array, tensor or variable of at least one dimension; only the first dimension may differ by rank.
        name: Name of the collective.
        process_set: Ranks that take part. Default: all.

    Raises:
        UsageError: If `value` is a scalar.
    """
    tensor = _with_dimensions(_tensor(value), "allgather")
    return differentiable.allgather(tensor, _call("allgather", name, process_set))


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Return the allgather of each of `tensors`.

    One by one, because Horovod's grouped operations lose errors: see as_one in collectives/packing.py. In a
    tf.function, TensorFlow leaves out a collective whose result is not used: use the same ones on every rank.

    Args:
        tensors: Arrays, tensors or variables of at least one dimension; only the first dimension may differ by rank.
        name: Name of the collective.
        ignore_name_scope: For compatibility with Horovod; names never include scopes here.
        process_set: Ranks that take part. Default: all.

    Raises:
        UsageError: If one of `tensors` is a scalar.
    """
    del ignore_name_scope
    values = [_with_dimensions(_tensor(t), "grouped_allgather") for t in tensors]
    call = _call("grouped_allgather", name, process_set)
    return list(map(differentiable.allgather, values, _numbered(call, len(values))))


def broadcast(
    value: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None
) -> tf.Tensor:
    """Return the value of rank `root_rank` on every rank.

    Args:
        value: A number, array, tensor or variable, of the same shape and dtype on every rank.
        root_rank: Rank that sends its value.
        name: Name of the collective.
        process_set: Ranks that take part, including the root. Default: all.
    """
    return differentiable.broadcast(
        _tensor(value), root_rank, _call("broadcast", name, process_set)
    )


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """Send rows of `tensor` to each rank, and return the rows received, concatenated in the order of ranks.

    Args:
        tensor: An array, tensor or variable of at least one dimension; only the first dimension may differ by rank.
        splits: Number of rows to send to each rank, integers of shape (ranks,). Default: equal parts.
        name: Name of the collective.
        ignore_name_scope: For compatibility with Horovod; names never include scopes here.
        process_set: Ranks that take part. Default: all.

    Returns:
        The rows received; with `splits`, also the number of rows from each rank, int32 of shape (ranks,).

    Raises:
        UsageError: If `tensor` is a scalar, or the number of rows is no multiple of that of ranks and `splits` is None.
    """
    del ignore_name_scope
    call = _call("alltoall", name, process_set)
    value = _with_dimensions(_tensor(tensor), "alltoall")
    ranks = ranks_of(call.ranks).size_at_run()
    if splits is not None:
        return differentiable.alltoall(value, tf.cast(tf.convert_to_tensor(splits), tf.int32), call)
    rows = value.shape[0]
    if rows is not None and not tf.is_tensor(ranks) and rows % ranks:
        raise UsageError(
            f"alltoall: {rows} rows cannot be divided evenly over {ranks} ranks: pass splits"
        )
    rows = tf.shape(value)[0]
    uneven = "alltoall: the rows cannot be divided evenly over the ranks: pass splits"
    with tf.control_dependencies([tf.debugging.assert_equal(rows % ranks, 0, uneven)]):
        equal = tf.fill([ranks], rows // ranks)
    return differentiable.alltoall(value, equal, call)[0]


def reducescatter(
    value: Any,
    name: str | None = None,
    op: Any = Average,
    *,
    device_dense: str = "",
    compression: Any = Compression.none,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce `value` over the ranks, and return this rank's part of the result along the first dimension.

    Args:
        value: An array, tensor or variable of at least one dimension, of the same shape on every rank. If the rows
            cannot be divided equally, the first ranks get one more.
        name: Name of the collective.
        op: Average or Sum.
        device_dense: Device for the reduction. Default: Horovod's choice.
        compression: `Compression.none` or `.fp16`.
        process_set: Ranks that take part. Default: all.
        prescale_factor: Factor for the value, before the reduction.
        postscale_factor: Factor for the result.

    Raises:
        UsageError: If `value` is a scalar, or `op` or `compression` is not supported.
    """
    tensor = _with_dimensions(_tensor(value), "reducescatter")
    call = _call(
        "reducescatter", name, process_set, op, compression, prescale_factor, postscale_factor
    )
    with on_device(device_dense):
        return differentiable.reducescatter(tensor, call)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Return the reducescatter of each of `tensors`, one by one, as in grouped_allgather.

    Other arguments as in reducescatter.

    Args:
        tensors: Arrays, tensors or variables of at least one dimension; the same shapes on every rank.

    Raises:
        UsageError: If one of `tensors` is a scalar, or `op` or `compression` is not supported.
    """
    values = [_with_dimensions(_tensor(t), "grouped_reducescatter") for t in tensors]
    call = _call(
        "grouped_reducescatter",
        None,
        process_set,
        op,
        compression,
        prescale_factor,
        postscale_factor,
    )
    with on_device(device_dense):
        return list(map(differentiable.reducescatter, values, _numbered(call, len(values))))


def join() -> tf.Tensor:
    """Wait until every rank has joined; until then, contribute zeros to the allreduces of the other ranks.

    For custom loops in which ranks have different numbers of batches: call it after the last batch, outside any
    tf.function. Once a rank has joined, the others can only use allreduce, and Average still divides by all ranks.

    Returns:
        The rank that joined last, int32.

    Raises:
        UsageError: If it is called inside a tf.function.
    """
    if not tf.executing_eagerly():
        raise UsageError("join: call it outside tf.function, between two steps")
    # TensorFlow takes an operation without inputs for a constant, and runs it once per function: use a new function.
    return tf.function(horovod_join).get_concrete_function()()


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | Communicator | None = None,
) -> Any:
    """Return the `obj` of rank `root_rank` on every rank, exactly as it was.

    Args:
        obj: Object made of None, bool, int, float, str, bytes, NumPy arrays and scalars, lists, tuples, sets and dicts.
        root_rank: Rank that sends its object, as numbered in the job; part of the process set.
        name: Name of the collective.
        process_set: Ranks that take part. Default: all.

    Raises:
        UsageError: On all ranks, if `obj` holds anything else, or the root is not in the process set.
    """
    ranks = ranks_of(process_set)
    if root_rank not in ranks.ranks:
        raise UsageError(
            f"broadcast_object: root_rank={root_rank} is not in the process set of ranks {ranks.ranks}"
        )
    root = ranks.ranks.index(root_rank)
    return allgather_object(obj if ranks.rank() == root else None, name, process_set)[root]


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | Communicator | None = None
) -> list[Any]:
    """Return the `obj` of every rank of the process set, in the order of ranks, exactly as they were.

    Other arguments as in broadcast_object.

    Raises:
        UsageError: On all ranks, if an `obj` holds anything that broadcast_object does not accept.
    """
    return ranks_of(process_set).exchange(obj, f"object_{name or ''}")


def _tensor(value: Any) -> tf.Tensor:
    return tf.convert_to_tensor(tf_variable(value))


def _with_dimensions(tensor: tf.Tensor, what: str) -> tf.Tensor:
    if tensor.shape.rank == 0:
        raise UsageError(f"{what}: expected at least one dimension, such as [value], not a scalar")
    return tensor


def _call(
    kind: str,
    name: str | None,
    process_set: ProcessSet | None,
    op: Any = Sum,
    compression: Any = Compression.none,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Call:
    if not isinstance(name, str | None):  # The place of `average` in horovod.tensorflow.
        raise UsageError(f"{kind}: name={name!r}: pass a str (for a mean or sum, average={name!r})")
    _check(kind.removeprefix("grouped_"), op, compression)
    prefix = f"hvdtrain_{kind}_{name}" if name else f"hvdtrain_{kind}"
    name = in_this_graph(prefix, ranks_of(process_set))
    return Call(name, process_set or global_process_set, op, prescale, postscale, compression)


def _check(kind: str, op: Any, compression: Any) -> None:
    """Raise UsageError if a collective does not support an operation or a compression."""
    refuse_lossy(compression, kind)
    if kind == "reducescatter":
        if op not in (Average, Sum):
            raise UsageError("reducescatter: op must be Average or Sum")
        if compression is BF16Compressor:
            raise UsageError("reducescatter: compression must be none or fp16")
    elif compression is BF16Compressor and op not in (Average, Sum):
        raise UsageError("allreduce: compression=bf16 works only with op=Average and op=Sum")


def _require_additive(call: Call) -> None:
    if call.op not in (Average, Sum):
        raise UsageError("allreduce: IndexedSlices work only with op=Average and op=Sum")


def _reduce_slices(slices: tf.IndexedSlices, call: Call, device: str) -> tf.IndexedSlices:
    """Concatenate the slices of all ranks, which is their sum, since slices of equal indices add up."""
    parts = {"values": slices.values, "indices": slices.indices}
    with on_device(device):
        values, indices = (
            differentiable.allgather(tensor, replace(call, name=f"{call.name}_{part}"))
            for part, tensor in parts.items()
        )
    factor = call.factor
    if not values.dtype.is_floating and (tf.is_tensor(factor) or factor != 1.0):
        # As in Horovod: fractions must not be truncated before slices of the same index are added up.
        values = tf.cast(values, tf.float64)
    return scaled(tf.IndexedSlices(values, indices, slices.dense_shape), factor)


def _numbered(call: Call, count: int) -> list[Call]:
    """Return `count` calls like this one, with names of their own."""
    return [replace(call, name=f"{call.name}_{number}") for number in range(count)]
