"""A stand-in for Horovod that lets one process act as rank 0 of a job of N ranks, without communication.

The values of other ranks are assumed to equal this rank's. Inside a tf.function, a collective becomes an operation
with a recognisable name and is recorded, so that tracing a step shows what it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common import process_sets

from hvdtrain.parallel.step_memory import COLLECTIVE


@dataclass(frozen=True)
class Message:
    """This rank's input to a collective in a tf.function.

    Attributes:
        kind: "allreduce", "reducescatter", "allgather", "broadcast" or "alltoall".
        bytes: Size of the input in bytes; None if its static shape is not known.
        ranks: Number of ranks that take part.
    """

    kind: str
    bytes: int | None
    ranks: int

    @property
    def wire_bytes(self) -> float:
        """Number of bytes that this rank sends; an allreduce of B bytes sends 2 (N - 1) / N * B in a ring.

        Patarasuk and Yuan 2009. An input of unknown size counts as 0 bytes.
        """
        size, n = self.bytes or 0, self.ranks
        factors = {"allreduce": 2 * (n - 1) / n, "allgather": n - 1.0, "broadcast": 1.0}
        return size * factors.get(self.kind, (n - 1) / n)


class SimulatedHorovod:
    """Replaces Horovod's functions; call `install` before anything else of hvdtrain is imported.

    Args:
        ranks: Number of ranks in the job.
        ranks_per_host: Number of ranks on each host.

    Attributes:
        messages: Collectives traced since the list was cleared.
    """

    def __init__(self, ranks: int, ranks_per_host: int) -> None:
        self._ranks = ranks
        self._local = ranks_per_host
        self._sets: dict[int, list[int]] = {0: list(range(ranks))}
        self._runs = False
        self.messages: list[Message] = []

    def install(self) -> None:
        """Replace the functions of horovod.tensorflow and the backend of its process sets."""
        functions = {
            "init": self.init,
            "shutdown": lambda: None,
            "is_initialized": lambda: self._runs,
            "rank": lambda: 0,
            "local_rank": lambda: 0,
            "cross_rank": lambda: 0,
            "size": lambda: self._ranks,
            "local_size": lambda: self._local,
            "cross_size": lambda: -(-self._ranks // self._local),
            "allreduce": self.allreduce,
            "grouped_allreduce": self.grouped_allreduce,
            "reducescatter": self.reducescatter,
            "allgather": self.allgather,
            "broadcast": self.broadcast,
            "alltoall": self.alltoall,
        }
        for name, planned in functions.items():
            setattr(hvd, name, planned)
        process_sets._setup(self)

    # Backend of Horovod's process sets.

    def _process_set_size(self, number: int) -> int:
        return len(self._sets[number])

    def _process_set_rank(self, number: int) -> int:
        return self._sets[number].index(0)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return dict(self._sets)

    def rank(self) -> int:
        """Return 0, the rank with the largest share of a batch that does not divide evenly."""
        return 0

    # Functions that scripts and hvdtrain call.

    def init(self, *args: Any, process_sets: Sequence[Any] = (), **kwargs: Any) -> None:
        """Register `process_sets`; other arguments are ignored."""
        self._runs = True
        hvd.global_process_set.ranks = list(self._sets[0])
        for one in process_sets:
            one.process_set_id = len(self._sets)
            self._sets[one.process_set_id] = list(one.ranks)

    def allreduce(
        self,
        tensor: Any,
        op: Any = hvd.Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Any = hvd.global_process_set,
        **others: Any,
    ) -> tf.Tensor:
        """Return the reduction of N equal tensors: N times `tensor` for Sum, `tensor` for any other `op`; scaled.

        In a tf.function, the result has only the right shape and dtype.
        """
        ranks = process_set.size()
        tensor = tf.convert_to_tensor(tensor)
        if not tf.executing_eagerly():
            self._note("allreduce", tensor, ranks)
            return tf.identity(tensor, name=COLLECTIVE)
        factor = prescale_factor * postscale_factor * (ranks if op == hvd.Sum else 1)
        return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)

    def grouped_allreduce(self, tensors: Sequence[Any], **how: Any) -> list[tf.Tensor]:
        """Return the allreduce of each of `tensors`."""
        return [self.allreduce(tensor, **how) for tensor in tensors]

    def reducescatter(
        self, tensor: Any, process_set: Any = hvd.global_process_set, **others: Any
    ) -> tf.Tensor:
        """Return this rank's part of `tensor`, the first of N along the first dimension."""
        ranks = process_set.size()
        self._note("reducescatter", tensor, ranks)
        rows = -(-tf.shape(tensor)[0] // ranks)
        if tensor.shape[0] is not None:
            rows = -(-tensor.shape[0] // ranks)
        return tf.identity(tensor[:rows], name=COLLECTIVE)

    def allgather(
        self, tensor: Any, process_set: Any = hvd.global_process_set, **others: Any
    ) -> tf.Tensor:
        """Return N copies of `tensor`, concatenated; as with Horovod, the number of rows is not static in a graph."""
        ranks = process_set.size()
        tensor = tf.convert_to_tensor(tensor)
        self._note("allgather", tensor, ranks)
        whole = tf.tile(tensor, [ranks, *[1] * (len(tensor.shape) - 1)])
        if tf.executing_eagerly():
            return whole
        return tf.raw_ops.PlaceholderWithDefault(input=whole, shape=[None, *tensor.shape[1:]])

    def broadcast(
        self, tensor: Any, root_rank: int, process_set: Any = hvd.global_process_set, **others: Any
    ) -> tf.Tensor:
        """Return `tensor`."""
        tensor = tf.convert_to_tensor(tensor)
        self._note("broadcast", tensor, process_set.size())
        return tf.identity(tensor, name=COLLECTIVE)

    def alltoall(
        self,
        tensor: Any,
        splits: Any = None,
        process_set: Any = hvd.global_process_set,
        **others: Any,
    ) -> Any:
        """Return `tensor`, as if as many rows were received as sent; also `splits` if given."""
        self._note("alltoall", tensor, process_set.size())
        found = tf.identity(tensor, name=COLLECTIVE)
        return found if splits is None else (found, splits)

    def _note(self, kind: str, tensor: tf.Tensor, ranks: int) -> None:
        if not tf.executing_eagerly():
            elements = tensor.shape.num_elements()
            size = None if elements is None else elements * tensor.dtype.size
            self.messages.append(Message(kind, size, ranks))
