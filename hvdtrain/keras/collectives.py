"""Horovod's queries and collectives under their own names and signatures.

Beyond Horovod: `init` sets the stall check, the collectives work inside a tf.function, take Keras
variables and bfloat16, and `allreduce` knows `Compression.bf16`. `broadcast_object` and
`allgather_object` never unpickle what they read from the network, as Horovod's do.

Inside a tf.function use what a collective returns: TensorFlow drops an operation that nothing needs,
and the other ranks would wait for it.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
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
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.tensorflow.mpi_ops import handle_average_backwards_compatibility

from hvdtrain.collectives.anchoring import anchored
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.compression import BF16Compressor, Compression, bf16_sum
from hvdtrain.collectives.names import in_this_graph
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.corrections import prepare_keras
from hvdtrain.keras_internals.variables import tf_variable
from hvdtrain.runtime import start_horovod

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(*args: Any, **kwargs: Any) -> None:
    """Start Horovod in this process, with the arguments of Horovod's init; do nothing if it runs already."""
    start_horovod(*args, **kwargs)
    prepare_keras()


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> tf.Tensor:
    """Return `value` combined over the ranks, in its own shape.

    Args:
        value: a number, array, tensor or variable; the same shape and dtype on every rank.
        name: of the collective; give one to each of several in a tf.function that call each other.
        average: Horovod's older way to say `op`.
        prescale_factor: multiplies the value before.
        postscale_factor: multiplies the result.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        compression: `Compression.none`, `.fp16` or `.bf16` (Average and Sum).
    """
    op = handle_average_backwards_compatibility(op, average)
    tensor = _tensor(value)
    name = _name("allreduce", name)
    if compression is BF16Compressor and tensor.dtype.is_floating:
        if op not in (Average, Sum):
            raise UsageError("allreduce: compression=bf16 works with op=Average and op=Sum")
        factor = prescale_factor * postscale_factor / (hvd.size() if op == Average else 1)
        return bf16_sum(tensor, name, ALL_RANKS, factor)
    reduced = hvd.allreduce(
        _to_wire(tensor),
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=Compression.none if compression is BF16Compressor else compression,
        name=name,
        ignore_name_scope=True,
    )
    return tf.cast(reduced, tensor.dtype)


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Return the values of all ranks, one behind the other along the first dimension.

    Args:
        value: an array, tensor or variable of at least one dimension; only the first may differ by rank.
        name: of the collective.
    """
    tensor = _with_dimensions(_tensor(value), "allgather")
    gathered = hvd.allgather(
        _to_wire(tensor), name=_name("allgather", name), ignore_name_scope=True
    )
    return tf.cast(gathered, tensor.dtype)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Return the value of rank `root_rank`.

    Args:
        value: a number, array, tensor or variable; the same shape and dtype on every rank.
        root_rank: whose value counts.
        name: of the collective.
    """
    tensor = _tensor(value)
    received = hvd.broadcast(
        _to_wire(tensor), root_rank, name=_name("broadcast", name), ignore_name_scope=True
    )
    return tf.cast(received, tensor.dtype)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> tf.Tensor:
    """Return this rank's part, along the first dimension, of `value` combined over the ranks.

    Args:
        value: an array, tensor or variable of at least one dimension; the same shape on every rank.
        name: of the collective.
        op: Average or Sum.
    """
    tensor = _with_dimensions(_tensor(value), "reducescatter")
    reduced = hvd.reducescatter(
        _to_wire(tensor), op=op, name=_name("reducescatter", name), ignore_name_scope=True
    )
    return tf.cast(reduced, tensor.dtype)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the `obj` of rank `root_rank`, exactly as it was.

    Args:
        obj: None, bool, int, float, str, bytes, NumPy arrays and scalars, and lists, tuples, sets and dicts of them.
        root_rank: whose object counts.
        name: of the collective.

    Raises:
        UsageError: on all ranks, if anything else is in it.
    """
    return allgather_object(obj if hvd.rank() == root_rank else None, name)[root_rank]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return every rank's `obj`, exactly as it was; see broadcast_object."""
    return ALL_RANKS.exchange(obj, f"object_{name or ''}")


def _tensor(value: Any) -> tf.Tensor:
    return tf.convert_to_tensor(tf_variable(value))


def _with_dimensions(tensor: tf.Tensor, what: str) -> tf.Tensor:
    if tensor.shape.rank == 0:
        raise UsageError(f"{what}: give at least one dimension, such as [value], not a scalar")
    return tensor


def _to_wire(tensor: tf.Tensor) -> tf.Tensor:
    """What travels: anchored (see anchoring.py), and bfloat16, which Horovod does not know, as float32."""
    return anchored(tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor)


def _name(kind: str, name: str | None) -> str:
    return in_this_graph(f"hvdtrain_{kind}_{name}" if name else f"hvdtrain_{kind}")
