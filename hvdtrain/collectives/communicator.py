"""Communicator: the ranks of one process set and their collectives.

The trainer calls Horovod's collectives through this class, so that the rules that keep ranks from waiting for each
other forever are in one place:

- The caller names a collective, with the same name on every rank. If a name occurs several times in the graph of a
  tf.function, a number is appended, because all of them may run at the same time. TensorFlow's name scopes, which may
  differ between ranks, are not part of the name.
- In a tf.function, the input of a collective depends on a variable; otherwise TensorFlow would fold the collective
  into a constant: see anchoring.py.
- Dtypes that Horovod 0.28.1 lacks are converted: bfloat16 to float32 in reductions; in collectives that only move data,
  float8 to float16, and others to bytes.
- A single rank communicates nothing.

`HorovodRanks` is the implementation on Horovod, `LoneRank` a group of one rank.
"""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import Adasum as Adasum
from horovod.tensorflow import Average as Average
from horovod.tensorflow import Max as Max
from horovod.tensorflow import Min as Min
from horovod.tensorflow import Sum as Sum

from hvdtrain.collectives.anchoring import anchored
from hvdtrain.collectives.encoding import decode, encode
from hvdtrain.collectives.packing import as_one
from hvdtrain.collectives.placement import device_dense
from hvdtrain.collectives.step_context import require_present
from hvdtrain.collectives.tensor_names import in_this_graph
from hvdtrain.errors import UsageError
from hvdtrain.rank_variables import is_elastic

_FRAME = struct.Struct("<q?")
"""Header of a rank's data in `exchange`: its length, and whether it is the value (True) or an error message."""
_MOVED_AS_THEY_ARE = {
    tf.bool,
    tf.uint8,
    tf.int8,
    tf.uint16,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.float32,
    tf.float64,
}


class Communicator(ABC):
    """The ranks of one process set. All of them must call the same collectives in the same order.

    Collectives accept tensors, NumPy arrays and numbers, and return tensors of the same dtype. Inside a tf.function,
    use the result: TensorFlow prunes an operation whose result is not used, and the other ranks would wait for it.
    Do not differentiate through them: see parallel/group_collectives.py.
    """

    @abstractmethod
    def rank(self) -> int:
        """Return this rank's index in the set."""

    @abstractmethod
    def size(self) -> int:
        """Return the number of ranks in the set."""

    @property
    @abstractmethod
    def ranks(self) -> list[int]:
        """The members of the set, as ranks of the job."""

    def includes_this(self) -> bool:
        """Return whether this rank is in the set."""
        return True

    def is_alone(self) -> bool:
        """Whether there are no other ranks, now and at every later run of a function that is being traced."""
        return self.size() == 1 and (tf.executing_eagerly() or not self._may_grow())

    def size_at_run(self) -> Any:
        """Return the number of ranks; a scalar int32 tensor in a graph that may outlive a change of it."""
        return self.size()

    def rank_at_run(self) -> Any:
        """Return this rank's index, in the same way."""
        return self.rank()

    def divide(self, value: Any) -> Any:
        """Return `value` (a float, or a float32 tensor) divided by `size_at_run`."""
        size = self.size_at_run()
        return value / (tf.cast(size, tf.float32) if tf.is_tensor(size) else size)

    @abstractmethod
    def is_global(self) -> bool:
        """Return whether all ranks of the job are in the set."""

    def allreduce(
        self,
        tensor: Any,
        name: str,
        op: Any = Sum,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> tf.Tensor:
        """Return `tensor` reduced over the ranks, in its own shape. A collective.

        Args:
            tensor: Tensor of the same shape and dtype on every rank.
            name: Name of the collective.
            op: Sum, Average, Min, Max or Adasum.
            prescale_factor: Factor for the tensor, before the reduction.
            postscale_factor: Factor for the result.
        """
        tensor = tf.convert_to_tensor(tensor)
        if self.is_alone():
            return _times(tensor, prescale_factor * postscale_factor)
        if tensor.dtype.is_complex and op in (Sum, Average):  # Horovod adds no complex numbers.
            parts = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])
            found = self.allreduce(parts, name, op, prescale_factor, postscale_factor)
            return tf.complex(found[0], found[1])
        wire = to_reducible(tensor)
        found = self._allreduce(
            wire, in_this_graph(name, self), op, prescale_factor, postscale_factor
        )
        return _like(found, tensor)

    def grouped_allreduce(
        self,
        tensors: Sequence[Any],
        name: str,
        op: Any = Sum,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[tf.Tensor]:
        """Return the allreduce of each of `tensors`, which have one dtype, once all are ready. A collective."""
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if self.is_alone():
            return [_times(tensor, prescale_factor * postscale_factor) for tensor in tensors]
        return as_one(
            tensors,
            lambda whole: self.allreduce(whole, name, op, prescale_factor, postscale_factor),
        )

    def reducescatter(
        self, tensor: Any, name: str, op: Any = Sum, postscale_factor: float = 1.0
    ) -> tf.Tensor:
        """Reduce `tensor` over the ranks, and return this rank's part along the first dimension. A collective.

        If the rows cannot be divided equally, the first ranks get one more.

        Args:
            tensor: Tensor of at least one dimension, of the same shape and dtype on every rank.
            name: Name of the collective.
            op: Sum or Average.
            postscale_factor: Factor for the result.
        """
        tensor = tf.convert_to_tensor(tensor)
        if self.is_alone():
            return _times(tensor, postscale_factor)
        found = self._reducescatter(
            to_reducible(tensor), in_this_graph(name, self), op, postscale_factor
        )
        return tf.cast(found, tensor.dtype)

    def allgather(self, tensor: Any, name: str) -> tf.Tensor:
        """Return the tensors of all ranks, concatenated along the first dimension. A collective.

        Args:
            tensor: Tensor of at least one dimension; only the first dimension may differ between ranks.
            name: Name of the collective.
        """
        tensor = tf.convert_to_tensor(tensor)
        if self.is_alone():
            return tensor
        return _from_wire(
            self._allgather(_to_wire(tensor), in_this_graph(name, self)), tensor.dtype
        )

    def broadcast(self, tensor: Any, root: int, name: str) -> tf.Tensor:
        """Return the tensor of rank `root`. A collective.

        Args:
            tensor: Tensor of the same shape and dtype on every rank.
            root: Rank of the job that sends its tensor; one of `ranks`.
            name: Name of the collective.
        """
        tensor = tf.convert_to_tensor(tensor)
        if self.is_alone():
            return tensor
        found = self._broadcast(_to_wire(tensor), root, in_this_graph(name, self))
        return _like(_from_wire(found, tensor.dtype), tensor)

    def alltoall(self, tensor: Any, splits: Any, name: str) -> tf.Tensor:
        """Send rows of `tensor` to each rank, and return the rows received, in the order of ranks. A collective.

        In eager mode Horovod gives every alltoall the same name: two threads must not call it at the same time.

        Args:
            tensor: Tensor of at least one dimension; only the first dimension may differ between ranks.
            splits: Number of rows to send to each rank of the set, int32 of shape (size,).
            name: Name of the collective.
        """
        tensor = tf.convert_to_tensor(tensor)
        if self.is_alone():
            return tensor
        found = self._alltoall(
            _to_wire(tensor), tf.convert_to_tensor(splits), in_this_graph(name, self)
        )
        return _from_wire(found, tensor.dtype)

    def exchange(self, value: Any, name: str) -> list[Any]:
        """Return every rank's `value`, unchanged, in the order of ranks. A collective, outside of tf.functions.

        Args:
            value: Python object of the types that `encoding.encode` accepts.
            name: Name of the collective.

        Raises:
            UsageError: On all ranks: the value of one of them cannot be encoded.
        """
        try:
            sent, fine = encode(value), True
        except UsageError as error:
            sent, fine = str(error).encode(), False
        framed = np.frombuffer(_FRAME.pack(len(sent), fine) + sent, np.uint8)
        # All ranks on the same device, also within tf.device(...), which other threads do not inherit.
        with tf.device("CPU:0"):
            bits = memoryview(self.allgather(framed, f"hvdtrain_{name}_values").numpy())
        everyone, begin = [], 0
        for rank in range(self.size()):
            length, fine = _FRAME.unpack_from(bits, begin)
            begin += _FRAME.size + length
            everyone.append(bits[begin - length : begin])
            if not fine:
                raise UsageError(
                    f"{name}: rank {rank} cannot send this to the other ranks: {bytes(everyone[rank]).decode()}. "
                    "Send numbers, strings, bytes, None, NumPy arrays, and lists, tuples, sets "
                    "and dicts of them"
                )
        return [decode(data) for data in everyone]

    def _may_grow(self) -> bool:
        """Whether other ranks may join during the life of this process."""
        return False

    # Implementations get tensors of dtypes that Horovod supports.

    @abstractmethod
    def _allreduce(
        self, wire: tf.Tensor, name: str, op: Any, prescale: float, postscale: float
    ) -> tf.Tensor: ...

    @abstractmethod
    def _reducescatter(
        self, wire: tf.Tensor, name: str, op: Any, postscale: float
    ) -> tf.Tensor: ...

    @abstractmethod
    def _allgather(self, wire: tf.Tensor, name: str) -> tf.Tensor: ...

    @abstractmethod
    def _broadcast(self, wire: tf.Tensor, root: int, name: str) -> tf.Tensor: ...

    @abstractmethod
    def _alltoall(self, wire: tf.Tensor, splits: tf.Tensor, name: str) -> tf.Tensor: ...


@dataclass(frozen=True)
class HorovodRanks(Communicator):
    """The ranks of a Horovod process set. Horovod must run when a method is called, not at construction.

    Attributes:
        process_set: The process set.
    """

    process_set: hvd.ProcessSet

    def rank(self) -> int:
        return int(self.process_set.rank())

    def size(self) -> int:
        return int(self.process_set.size())

    @property
    def ranks(self) -> list[int]:
        # The global process set has no list of ranks before Horovod runs.
        return list(self.process_set.ranks or range(self.size()))

    def includes_this(self) -> bool:
        # None: unknown before Horovod runs.
        return self.process_set.included() is not False

    def size_at_run(self) -> Any:
        if tf.executing_eagerly() or not self._may_grow():
            return self.size()
        return hvd.size_op(self.process_set.process_set_id)

    def rank_at_run(self) -> Any:
        # Horovod has no such operation for a process set; only the global one changes.
        if tf.executing_eagerly() or not self._may_grow() or not self.is_global():
            return self.rank()
        return hvd.rank_op()

    def is_global(self) -> bool:
        return bool(self.size() == hvd.size())

    def _may_grow(self) -> bool:
        return is_elastic(os.environ)

    def _allreduce(
        self, wire: tf.Tensor, name: str, op: Any, prescale: float, postscale: float
    ) -> tf.Tensor:
        return hvd.allreduce(
            wire,
            op=op,
            device_dense=device_dense(wire),
            prescale_factor=prescale,
            postscale_factor=postscale,
            **self._called(name),
        )

    def _reducescatter(self, wire: tf.Tensor, name: str, op: Any, postscale: float) -> tf.Tensor:
        return hvd.reducescatter(
            wire,
            op=op,
            device_dense=device_dense(wire),
            postscale_factor=postscale,
            **self._called(name),
        )

    def _allgather(self, wire: tf.Tensor, name: str) -> tf.Tensor:
        return hvd.allgather(wire, **self._called(name))

    def _broadcast(self, wire: tf.Tensor, root: int, name: str) -> tf.Tensor:
        return hvd.broadcast(wire, root, **self._called(name))

    def _alltoall(self, wire: tf.Tensor, splits: tf.Tensor, name: str) -> tf.Tensor:
        received, _ = hvd.alltoall(wire, splits, **self._called(name))
        return received

    def _called(self, name: str) -> dict[str, Any]:
        require_present(self.ranks)
        return {"name": name, "ignore_name_scope": True, "process_set": self.process_set}


def _nobody(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a rank alone communicates nothing")


@dataclass(frozen=True)
class LoneRank(Communicator):
    """A group of this rank alone, without a Horovod process set.

    Attributes:
        job_rank: Rank of this process in the job.
    """

    job_rank: int

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    @property
    def ranks(self) -> list[int]:
        return [self.job_rank]

    def is_global(self) -> bool:
        return False

    _allreduce = _reducescatter = _nobody
    _allgather = _broadcast = _alltoall = _nobody


ALL_RANKS: Communicator = HorovodRanks(hvd.global_process_set)
"""All ranks of the job."""


def ranks_of(process_set: hvd.ProcessSet | Communicator | None) -> Communicator:
    """Return the communicator of a user's `process_set`; None: all ranks."""
    if process_set is None:
        return ALL_RANKS
    return process_set if isinstance(process_set, Communicator) else HorovodRanks(process_set)


def to_reducible(tensor: tf.Tensor) -> tf.Tensor:
    """Return `tensor` as the input of a reduction: anchored; bfloat16, which Horovod lacks, as float32."""
    return anchored(tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor)


def _to_wire(tensor: tf.Tensor) -> tf.Tensor:
    """Return `tensor` as the input of a collective that only moves data."""
    if tensor.dtype in _MOVED_AS_THEY_ARE:
        return anchored(tensor)
    if _is_float8(tensor.dtype):
        return anchored(tf.cast(tensor, tf.float16))
    return anchored(tf.bitcast(tensor, tf.uint8))


def _from_wire(found: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Convert the result for an input from `_to_wire` back to `dtype`."""
    if dtype in _MOVED_AS_THEY_ARE:
        return found
    return tf.cast(found, dtype) if _is_float8(dtype) else tf.bitcast(found, dtype)


def _is_float8(dtype: tf.DType) -> bool:
    """Whether `dtype` is a float8, which tf.bitcast does not support; float16 represents its numbers exactly."""
    return bool(dtype.is_floating and dtype.size == 1)


def _like(found: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Return `found` with the static shape and the dtype of `tensor`."""
    found.set_shape(tensor.shape)
    return tf.cast(found, tensor.dtype)


def _times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    # As Horovod scales integers: in float64, then truncated.
    if factor == 1.0:
        return tensor
    wide = tensor.dtype if tensor.dtype.is_complex else tf.float64
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)
