"""Horovod as the script of rank 0 sees it in a job of N ranks, in one process that has nobody to talk to.

Every value of another rank is taken to be like this rank's own. Inside a tf.function a collective is an operation
whose name says so, and it is noted: what a step sends is known once it is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common import process_sets

COLLECTIVE = "planned_collective"
"""In the names of operations that stand for collectives: their output has memory of its own, as Horovod's has."""


@dataclass(frozen=True)
class Message:
    """What this rank gives to a collective in a tf.function.

    Attributes:
        kind: allreduce, reducescatter, allgather, broadcast or alltoall.
        bytes: None: not known before the step runs.
        ranks: that take part.
    """

    kind: str
    bytes: int | None
    ranks: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank sends, in a ring (Patarasuk and Yuan 2009): 2 (N - 1) / N for an allreduce."""
        size, n = self.bytes or 0, self.ranks
        factors = {"allreduce": 2 * (n - 1) / n, "allgather": n - 1.0, "broadcast": 1.0}
        return size * factors.get(self.kind, (n - 1) / n)


class PlannedEngine:
    """Takes the place of Horovod's functions; `install` before anything else of hvdtrain is imported.

    Args:
        ranks: of the job.
        ranks_per_host: of them, on this rank's host.

    Attributes:
        messages: of the functions that have been traced since it was cleared.
    """

    def __init__(self, ranks: int, ranks_per_host: int) -> None:
        self._ranks = ranks
        self._local = ranks_per_host
        self._sets: dict[int, list[int]] = {0: list(range(ranks))}
        self._runs = False
        self.messages: list[Message] = []

    def install(self) -> None:
        """Let horovod.tensorflow, and its process sets, be this."""
        constants = {
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
        for name, planned in constants.items():
            setattr(hvd, name, planned)
        process_sets._setup(self)

    # What Horovod's process sets ask.

    def _process_set_size(self, number: int) -> int:
        return len(self._sets[number])

    def _process_set_rank(self, number: int) -> int:
        return self._sets[number].index(0)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return dict(self._sets)

    def rank(self) -> int:
        """This rank's number: 0 has the largest share of a batch that does not divide evenly."""
        return 0

    # What scripts and hvdtrain call.

    def init(self, *args: Any, process_sets: Sequence[Any] = (), **kwargs: Any) -> None:
        """Know these process sets."""
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
        """Return the sum, mean or other of N equal tensors."""
        ranks = process_set.size()
        tensor = tf.convert_to_tensor(tensor)
        if not tf.executing_eagerly():
            self._note("allreduce", tensor, ranks)
            return tf.identity(tensor, name=COLLECTIVE)
        factor = prescale_factor * postscale_factor * (ranks if op == hvd.Sum else 1)
        return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)

    def grouped_allreduce(self, tensors: Sequence[Any], **how: Any) -> list[tf.Tensor]:
        """Return what `allreduce` does of each."""
        return [self.allreduce(tensor, **how) for tensor in tensors]

    def reducescatter(
        self, tensor: Any, process_set: Any = hvd.global_process_set, **others: Any
    ) -> tf.Tensor:
        """Return the first part of N."""
        ranks = process_set.size()
        self._note("reducescatter", tensor, ranks)
        rows = -(-tf.shape(tensor)[0] // ranks)
        if tensor.shape[0] is not None:
            rows = -(-tensor.shape[0] // ranks)
        return tf.identity(tensor[:rows], name=COLLECTIVE)

    def allgather(
        self, tensor: Any, process_set: Any = hvd.global_process_set, **others: Any
    ) -> tf.Tensor:
        """Return N times the same; how many rows that is, is not known in a graph, as with Horovod."""
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
        """Return the tensor."""
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
        """Return as many rows as are sent."""
        self._note("alltoall", tensor, process_set.size())
        found = tf.identity(tensor, name=COLLECTIVE)
        return found if splits is None else (found, splits)

    def _note(self, kind: str, tensor: tf.Tensor, ranks: int) -> None:
        if not tf.executing_eagerly():
            elements = tensor.shape.num_elements()
            size = None if elements is None else elements * tensor.dtype.size
            self.messages.append(Message(kind, size, ranks))
