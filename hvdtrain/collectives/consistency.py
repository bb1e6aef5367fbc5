"""Ranks exchange small facts, and stop together when they disagree."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator, Max
from hvdtrain.errors import EngineError, ReplicaError, UsageError


def require_equal(
    facts: dict[str, Any], what: str, name: str = "facts", ranks: Communicator = ALL_RANKS
) -> None:
    """Raise ReplicaError on every rank if `facts` are not the same on all. A collective.

    Args:
        facts: name -> value; what JSON cannot hold is compared as text.
        what: what is about to start, for the message.
        name: of the collective.
        ranks: that are compared.
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
    """Raise ReplicaError on every rank if what was sampled from the data differs by more than rounding. A collective.

    Machines may round what a script computes from its data differently, so numbers may be 0.1 % apart.

    Args:
        values: part of the data -> its samples; names and numbers of samples are the same on all ranks.
        what: what is about to start, for the message.
        ranks: that are compared.
    """
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


def on_first(work: Callable[[], Any], name: str, ranks: Communicator = ALL_RANKS) -> Any:
    """Let the first rank do `work`, and return its result, which can be sent (`exchange`), on all. A collective.

    Raises:
        UsageError, EngineError: on all ranks, if `work` failed; see raise_alike.
    """
    result, failed = None, None
    if ranks.rank() == 0:
        try:
            result = work()
        except Exception as error:
            failed = error
    raise_alike(failed, name, ranks)
    return ranks.exchange(result, name)[0]


def raise_alike(error: Exception | None, what: str, ranks: Communicator = ALL_RANKS) -> None:
    """Raise on every rank if one of them has an `error`; without one, cost a small allreduce. A collective.

    Args:
        error: what happened on this rank, if anything did.
        what: this rank was at, for the message.
        ranks: that look at it together.

    Raises:
        UsageError: on all ranks alike: the first one's UsageError, or its OSError or TensorFlow's, such as a file that
            cannot be written.
        EngineError: on the ranks that have no error: another one failed otherwise, and raises its own.
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
