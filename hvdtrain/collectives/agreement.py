"""Ranks tell each other small facts, and stop together when they disagree.

Facts travel as JSON in Horovod's allgather, never pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.errors import ReplicaError, UsageError


def exchange(value: Any, name: str) -> list[Any]:
    """Return every rank's `value`, in the order of ranks. A collective.

    Args:
        value: this rank's: numbers, texts, None, and lists and dicts of them. As in JSON a tuple arrives as a
            list, and keys as texts; a number of NumPy as Python's.
        name: of the collective, the same on all ranks and not in use at the same time.

    Raises:
        UsageError: a value that cannot travel; before anything is sent.
    """
    try:
        text = json.dumps(value, default=_number)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name}: this cannot be sent to the other ranks: {error}. Send numbers, texts, lists and dicts "
            "(array.tolist())"
        ) from None
    if hvd.size() == 1:
        return [json.loads(text)]
    sent = np.frombuffer(text.encode(), np.uint8)
    lengths = hvd.allgather(tf.constant([sent.size]), name=f"hvdtrain_{name}_lengths").numpy()
    everything = hvd.allgather(tf.constant(sent), name=f"hvdtrain_{name}_texts").numpy()
    ends = np.cumsum(lengths)
    return [
        json.loads(everything[end - length : end].tobytes())
        for end, length in zip(ends, lengths, strict=True)
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
    """Let rank 0 do `work`, and return its result, which JSON can hold, on all ranks. A collective.

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


def _number(value: Any) -> Any:
    """Return a number of NumPy as Python's; the reason that json.dumps gives for anything else."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _short(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
