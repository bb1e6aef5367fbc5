"""Transports that carry activations and gradients between neighbouring stages.

Horovod's TensorFlow binding has no send from one rank to another. Under MPI, mpi4py has one; elsewhere a message is an
alltoall in the process set of the two ranks, in which the receiver contributes nothing. Sending returns at once in
both (with blocking sends, two stages that send to each other would deadlock), and messages between two ranks in
one direction arrive in the order in which they were sent, so they need no numbers.

Latency in ms between two processes of one machine (4 B / 64 KB / 4 MB): mpi4py 0.4 / 0.6 / 2.5, alltoall over MPI
1.1 / 1.5 / 19, over Gloo 2.3 / 1.3 / 12.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.environment import STALL_SHUTDOWN_SECONDS
from hvdtrain.errors import EngineError

_BUSY_SECONDS = 0.002
"""Seconds for which a wait polls and yields to other processes, before it sleeps between polls."""
_PAUSE_SECONDS = 0.0002


@dataclass(frozen=True)
class ArraySpec:
    """Shape and NumPy dtype of an array to receive."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def bytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Transport(Protocol):
    """Interface for messages, each a list of arrays, between this rank and its neighbours in the pipeline."""

    def send(self, rank: int, arrays: Sequence[np.ndarray]) -> None:
        """Send `arrays` to `rank` and return without waiting; the arrays must not be changed afterwards."""

    def receive(self, rank: int, specs: Sequence[ArraySpec], what: str) -> list[np.ndarray]:
        """Return the next message from `rank`.

        Args:
            rank: Rank of the sender.
            specs: Shape and dtype of each array of the message.
            what: Description of the message, for errors.

        Raises:
            EngineError: The message did not come in time (MPI), or has another size (alltoall).
        """

    def flush(self) -> None:
        """Wait until all messages have left."""


def make_transport(pairs: Mapping[int, Communicator]) -> Transport:
    """Return the fastest transport available. A collective of all ranks.

    Args:
        pairs: For the rank of each neighbour, the process set of it and this rank.

    Raises:
        EngineError: MPI numbers the ranks differently from Horovod, or runs without thread support.
    """
    limit = stall_limit(os.environ)
    if hvd.mpi_enabled() and importlib.util.find_spec("mpi4py") is not None:
        return MpiTransport(limit)
    return AlltoallTransport(pairs)


def stall_limit(environ: Mapping[str, str]) -> float:
    """Return Horovod's limit, in seconds, on waiting for another rank; inf: no limit."""
    text = environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "")
    try:
        seconds = float(text)
    except ValueError:
        seconds = float(STALL_SHUTDOWN_SECONDS)
    disabled = environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
    return math.inf if disabled or seconds <= 0 else seconds


class MpiTransport:
    """Transport with mpi4py's Isend and Irecv, in an MPI communicator of its own.

    Horovod has initialized MPI for several threads and keeps using it from its own. Nothing here blocks inside
    MPI: waits poll, so they can end at the limit, in seconds.
    """

    def __init__(self, limit: float) -> None:
        self._mpi = importlib.import_module("mpi4py.MPI")
        world = self._mpi.COMM_WORLD
        if world.Get_rank() != ALL_RANKS.rank() or world.Get_size() != ALL_RANKS.size():
            raise EngineError(
                f"MPI calls this process rank {world.Get_rank()} of {world.Get_size()}, Horovod {ALL_RANKS.rank()} of "
                f"{ALL_RANKS.size()}: pipeline stages need a launch over MPI (hvdtrain run --controller mpi) or over "
                "Gloo (--controller gloo)"
            )
        if self._mpi.Query_thread() != self._mpi.THREAD_MULTIPLE:
            raise EngineError(
                "MPI runs without support for threads (HOROVOD_MPI_THREADS_DISABLE), which pipeline stages beside "
                "Horovod need: leave that out, or start with --controller gloo"
            )
        self._communicator = world.Dup()
        self._limit = limit
        self._leaving: list[tuple[Any, np.ndarray]] = []

    def send(self, rank: int, arrays: Sequence[np.ndarray]) -> None:
        self._leaving = [(request, data) for request, data in self._leaving if not request.Test()]
        for array in arrays:
            data = _bytes_of(array)
            self._leaving.append((self._communicator.Isend(data, dest=rank), data))

    def receive(self, rank: int, specs: Sequence[ArraySpec], what: str) -> list[np.ndarray]:
        buffers = [np.empty(spec.bytes, np.uint8) for spec in specs]
        requests = [self._communicator.Irecv(buffer, source=rank) for buffer in buffers]
        self._wait(requests, f"{what} from rank {rank}")
        return [_array_of(data, spec) for data, spec in zip(buffers, specs, strict=True)]

    def flush(self) -> None:
        self._wait(
            [request for request, _ in self._leaving], "a neighbour to receive what was sent"
        )
        self._leaving.clear()

    def _wait(self, requests: Sequence[Any], what: str) -> None:
        begin = time.monotonic()
        while not self._mpi.Request.Testall(requests):
            waited = time.monotonic() - begin
            if waited > self._limit:
                for request in requests:
                    with contextlib.suppress(self._mpi.Exception):
                        request.Cancel()
                raise EngineError(
                    f"Rank {ALL_RANKS.rank()} waited {self._limit:g} s for {what}: that rank "
                    "failed, ended, or is doing something else "
                    "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is the limit)"
                )
            time.sleep(0 if waited < _BUSY_SECONDS else _PAUSE_SECONDS)


class AlltoallTransport:
    """Transport with Horovod's alltoall in process sets of two ranks; Horovod's stall check ends its waits."""

    def __init__(self, pairs: Mapping[int, Communicator]) -> None:
        self._pairs = pairs
        # One thread for each neighbour, to keep its messages in order.
        self._threads = {rank: ThreadPoolExecutor(1, "hvdtrain-pipeline") for rank in pairs}
        self._leaving: list[Future[Any]] = []
        self._functions = {
            (sender, other): _alltoall(sender, pair)
            for other, pair in pairs.items()
            for sender in (ALL_RANKS.rank(), other)
        }

    def send(self, rank: int, arrays: Sequence[np.ndarray]) -> None:
        data = [_bytes_of(array) for array in arrays]
        joined = data[0] if len(data) == 1 else np.concatenate([np.empty(0, np.uint8), *data])
        self._raise_failures([future for future in self._leaving if future.done()])
        self._leaving = [future for future in self._leaving if not future.done()]
        self._leaving.append(
            self._threads[rank].submit(self._exchange, ALL_RANKS.rank(), rank, tf.constant(joined))
        )

    def receive(self, rank: int, specs: Sequence[ArraySpec], what: str) -> list[np.ndarray]:
        del what
        joined = self._exchange(rank, rank, tf.zeros([0], tf.uint8)).numpy()
        ends = np.cumsum([0, *(spec.bytes for spec in specs)])
        if ends[-1] != joined.size:
            raise EngineError(
                f"Rank {ALL_RANKS.rank()} expected {ends[-1]} bytes from rank {rank} and got {joined.size}: the "
                "ranks do not run the same stages"
            )
        return [
            _array_of(joined[begin:end], spec)
            for begin, end, spec in zip(ends[:-1], ends[1:], specs, strict=True)
        ]

    def flush(self) -> None:
        self._raise_failures(self._leaving)
        self._leaving.clear()

    def _exchange(self, sender: int, other: int, data: tf.Tensor) -> tf.Tensor:
        """Take part in the alltoall that carries a message of rank `sender`."""
        splits = [0, 0]
        splits[1 - self._pairs[other].rank()] = int(data.shape[0])
        return self._functions[sender, other](data, tf.constant(splits))

    @staticmethod
    def _raise_failures(futures: Sequence[Future[Any]]) -> None:
        for future in futures:
            future.result()


def _alltoall(sender: int, pair: Communicator) -> Any:
    """Return the alltoall that carries messages of rank `sender` to the other rank of the pair.

    A graph function: in eager mode all of Horovod's alltoalls share a name, which two threads may not use at once.
    """

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.uint8), tf.TensorSpec([2], tf.int32)],
        autograph=False,
    )
    def exchange(data: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        return pair.alltoall(data, splits, f"hvdtrain_pipeline_from_{sender}")

    return exchange


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _array_of(data: np.ndarray, spec: ArraySpec) -> np.ndarray:
    return data.view(spec.dtype).reshape(spec.shape)
