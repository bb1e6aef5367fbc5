"""Ranks tell each other small facts, and stop together when they disagree.

Facts travel in Horovod's allgather, never pickled: see encoding.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.encoding import decode, encode
from hvdtrain.errors import ReplicaError, UsageError


def exchange(value: Any, name: str) -> list[Any]:
    """Return every rank's `value`, in the order of ranks. A collective.

    Args:
        value: this rank's; what `encoding.encode` takes. It arrives exactly as it was.
        name: of the collective, the same on all ranks and not in use at the same time.

    Raises:
        UsageError: on all ranks: the value of one cannot travel.
    """
    try:
        sent, fine = encode(value), True
    except UsageError as error:
        sent, fine = str(error).encode(), False
    everyone = [(sent, fine)] if hvd.size() == 1 else _gather_bytes(sent, fine, name)
    for rank, (data, fine) in enumerate(everyone):
        if not fine:
            raise UsageError(
                f"{name}: rank {rank} cannot send this to the other ranks: {data.decode()}. Send numbers, texts, "
                "bytes, None, NumPy arrays, and lists, tuples, sets and dicts of them"
            )
    return [decode(data) for data, _ in everyone]


def _gather_bytes(sent: bytes, fine: bool, name: str) -> list[tuple[bytes, bool]]:
    """Return what every rank gives."""
    facts = tf.constant([[len(sent), int(fine)]], tf.int64)
    known = hvd.allgather(facts, name=f"hvdtrain_{name}_lengths").numpy()
    bits = tf.constant(np.frombuffer(sent, np.uint8))
    everything = hvd.allgather(bits, name=f"hvdtrain_{name}_values").numpy().tobytes()
    ends = np.cumsum(known[:, 0])
    return [
        (everything[end - length : end], bool(fine))
        for end, (length, fine) in zip(ends, known, strict=True)
    ]


def require_equal(facts: dict[str, Any], what: str, name: str = "facts") -> None:
    """Raise ReplicaError on every rank if `facts` are not the same on all. A collective.

    Args:
        facts: name -> value; what JSON cannot hold is compared as text.
        what: what is about to start, for the message.
        name: of the collective.
    """
    everyone = exchange(json.loads(json.dumps(facts, default=str)), name)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        differing = [
            f"{key} is {_short(first.get(key))} on rank 0 and {_short(theirs.get(key))} on rank {rank}"
            for key in sorted(first.keys() | theirs.keys())
            if first.get(key) != theirs.get(key)
        ]
        if differing:
            raise ReplicaError(
                f"The ranks disagree before {what}: {'; '.join(differing)}. Every rank must run the same script with "
                "the same arguments and data; hvdtrain itself gives each its share."
            )


def require_alike(values: Mapping[str, list[float | str]], what: str) -> None:
    """Raise ReplicaError on every rank if what was sampled from the data differs by more than rounding. A collective.

    Machines may round what a script computes from its data differently, so numbers may be 0.1 % apart.

    Args:
        values: part of the data -> its samples; names and numbers of samples are the same on all ranks.
        what: what is about to start, for the message.
    """
    everyone = exchange(values, "samples")
    for rank, theirs in enumerate(everyone):
        differing = [name for name in values if not _alike(everyone[0][name], theirs[name])]
        if differing:
            raise ReplicaError(
                f"The ranks disagree before {what}: {' and '.join(differing)} hold other values on rank {rank} than on "
                "rank 0. Every rank must have the same arrays in the same order, of which hvdtrain gives each its "
                "share: shuffle and split with a seed, and do not shard"
            )


def _alike(ours: list[float | str], theirs: list[float | str]) -> bool:
    def one(a: float | str, b: float | str) -> bool:
        if isinstance(a, str) or isinstance(b, str):
            return a == b
        return bool(np.isclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True))

    return all(map(one, ours, theirs))


def on_first(is_first: bool, work: Callable[[], Any], name: str) -> Any:
    """Let rank 0 do `work`, and return its result, which can be sent (`exchange`), on all ranks. A collective.

    Raises:
        UsageError: on all ranks, if `work` raised one.
    """
    found: dict[str, Any] = {}
    if is_first:
        try:
            found = {"result": work()}
        except UsageError as error:
            found = {"complaint": str(error)}
    found = exchange(found, name)[0]
    if "complaint" in found:
        raise UsageError(found["complaint"])
    return found["result"]


def any_rank(flag: bool, name: str) -> bool:
    """Return whether `flag` is set on at least one rank. A collective."""
    if hvd.size() == 1:
        return flag
    vote = hvd.allreduce(tf.constant(int(flag)), op=hvd.Max, name=f"hvdtrain_{name}")
    return bool(vote.numpy())


def _short(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
