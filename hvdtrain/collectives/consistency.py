"""Checks that ranks agree, and errors that stop all of them together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator, Max
from hvdtrain.errors import EngineError, ReplicaError, UsageError


def require_equal(
    facts: dict[str, Any], what: str, name: str = "facts", ranks: Communicator = ALL_RANKS
) -> None:
    """Require that `facts` are the same on all ranks. A collective.

    Args:
        facts: Values by name; a value that JSON cannot hold is compared as text.
        what: What is about to start, for the message.
        name: Name of the collective.
        ranks: Ranks to compare.

    Raises:
        ReplicaError: On all ranks: a fact differs.
    """
    everyone = ranks.exchange(json.loads(json.dumps(facts, default=str)), name)
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
                "the same arguments and data; hvdtrain gives each rank its share."
            )


def require_alike(
    values: Mapping[str, list[float | str]], what: str, ranks: Communicator = ALL_RANKS
) -> None:
    """Require that samples of the data are the same on all ranks, up to rounding. A collective if there are any.

    Numbers may differ by 0.1 %, because machines may round differently in what a script computes from its data.

    Args:
        values: Samples by name of the part of the data; the names and the numbers of samples are the same on all ranks.
        what: What is about to start, for the message.
        ranks: Ranks to compare.

    Raises:
        ReplicaError: On all ranks: the samples of a part differ.
    """
    if not values:
        return
    everyone = ranks.exchange(values, "samples")
    for rank, theirs in enumerate(everyone):
        differing = [name for name in values if not alike(everyone[0][name], theirs[name])]
        if differing:
            raise ReplicaError(
                f"The ranks disagree before {what}: rank 0 and rank {rank} have different values for "
                f"{' and '.join(differing)}. Every rank must have the same data in the same order, and "
                "hvdtrain gives each its share: do not shard; if it is drawn, shuffled or split at "
                "random, call hvdtrain.init(seed=1) first"
            )


def alike(ours: list[float | str], theirs: list[float | str]) -> bool:
    """Whether two samples of data are the same, up to rounding."""

    def one(a: float | str, b: float | str) -> bool:
        if isinstance(a, str) or isinstance(b, str):
            return a == b
        return bool(np.isclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True))

    return all(map(one, ours, theirs))


def raise_alike(error: Exception | None, what: str, ranks: Communicator = ALL_RANKS) -> None:
    """Raise an error on all ranks if one of them has an `error`. A collective: a small allreduce without errors.

    Args:
        error: Error on this rank, or None.
        what: What this rank was doing, for the message.
        ranks: Ranks that take part.

    Raises:
        UsageError: On all ranks: the first error is a UsageError, OSError or TensorFlow error, such as a file that
            cannot be written.
        EngineError: On ranks without an error: the first error is of another type. A rank with an error raises it.
    """
    if not any_rank(error is not None, "failure", ranks):
        return
    expected = isinstance(error, UsageError | OSError | tf.errors.OpError)
    mine = None if error is None else [expected, _told(error, what)]
    everyone = ranks.exchange(mine, "failure")
    rank, theirs = next(each for each in zip(ranks.ranks, everyone, strict=True) if each[1])
    expected, told = theirs
    if expected:
        raise UsageError(told) from error
    raise error or EngineError(f"Rank {rank} failed: {told}")


def _told(error: Exception, what: str) -> str:
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, tf.errors.OpError):
        return f"{what}: {error.message.rpartition('}} ')[2]}"  # without the node's name
    return f"{what}: {error if isinstance(error, OSError) else repr(error)}"


def any_rank(flag: bool, name: str, ranks: Communicator = ALL_RANKS) -> bool:
    """Return whether `flag` is set on at least one rank. A collective."""
    return bool(ranks.allreduce(int(flag), f"hvdtrain_{name}", Max).numpy())


def _short(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
