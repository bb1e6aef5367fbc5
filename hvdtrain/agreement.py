"""Ranks tell each other small facts, and stop together when they disagree.

Facts travel as JSON in Horovod's allgather, never pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.errors import ReplicaError, UsageError


def exchange(value: Any, name: str) -> list[Any]:
    """Return every rank's `value` (anything that JSON can hold), in the order of ranks. A collective.

    Args:
        value: this rank's value.
        name: of the collective, the same on all ranks and not in use at the same time.
    """
    if hvd.size() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value, default=str).encode(), np.uint8)
    lengths = hvd.allgather(tf.constant([text.size]), name=f"hvdtrain_{name}_lengths").numpy()
    everything = hvd.allgather(tf.constant(text), name=f"hvdtrain_{name}_texts").numpy()
    ends = np.cumsum(lengths)
    return [
        json.loads(everything[end - length : end].tobytes())
        for end, length in zip(ends, lengths, strict=True)
    ]


def require_equal(facts: dict[str, Any], what: str, name: str = "facts") -> None:
    """Raise ReplicaError on every rank if `facts` are not the same on all. A collective.

    Args:
        facts: name -> value that JSON can hold.
        what: what is about to start, for the message.
        name: of the collective.
    """
    everyone = exchange(facts, name)
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


def _short(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
