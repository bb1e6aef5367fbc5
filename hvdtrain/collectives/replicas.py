"""Replicas: broadcast variables to all ranks, and check that they are equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator, Max, Min, ranks_of
from hvdtrain.collectives.consistency import require_alike, require_equal
from hvdtrain.collectives.statistics import fold_rank_into_seeds
from hvdtrain.errors import ReplicaError, UsageError
from hvdtrain.keras_internals.adapted import Adapted, adapted_states
from hvdtrain.keras_internals.variables import (
    local_variables,
    replicated_variables,
    seeds_among,
    tf_variable,
    unique,
    variable_name,
)

ROUNDING = 1e-5
"""Largest difference between replicas that a GPU's order of additions explains, relative to the variable's maximum."""


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: hvd.ProcessSet | Communicator | None = None,
    inplace: bool = False,
) -> None:
    """Assign the values of rank `root_rank` to the variables of all ranks. A collective.

    The random seeds of layers are then made different on each rank (the first one keeps them), as ranks that drop the
    same units of their examples would not train as one process does.

    Args:
        variables: Keras or TensorFlow variables, in the same order on every rank.
        root_rank: Rank whose values are sent.
        process_set: Ranks that take part. Default: all.
        inplace: For compatibility with Horovod; has no effect on the result.
    """
    del inplace
    ranks, variables = ranks_of(process_set), unique(variables)
    copy_variables(variables, root_rank, ranks)
    if ranks.includes_this():
        fold_rank_into_seeds(seeds_among(variables), ranks.rank())


def copy_variables(variables: Iterable[Any], root_rank: int, ranks: Communicator) -> None:
    """Assign the values of rank `root_rank` to the variables of all `ranks`, also to random seeds. A collective."""
    targets = [tf_variable(v) for v in variables]
    # Eager, one after the other: a tf.function would be traced again for each model and gain nothing.
    for index, target in enumerate(targets):
        name = f"hvdtrain_broadcast_{index}"
        target.assign(ranks.broadcast(target.read_value(), root_rank, name))


def broadcast_global_variables(root_rank: int) -> None:
    """Raise UsageError: this function of Horovod's needs TensorFlow 1's list of all variables, which Keras 3 lacks.

    Raises:
        UsageError: Always; the message names the call to use instead. (Horovod also raises on TensorFlow 2.)
    """
    raise UsageError(
        "broadcast_global_variables: Keras 3 keeps no list of all variables. Use "
        f"broadcast_variables(model.variables, root_rank={root_rank}), or BroadcastGlobalVariablesCallback in model.fit"
    )


def require_same_model(
    facts: dict[str, Any], model: keras.Model, what: str, name: str, ranks: Communicator = ALL_RANKS
) -> None:
    """Require that `facts`, and what the layers of a model have learnt with `adapt`, are the same on all ranks.

    A collective; for its arguments and errors see `require_equal`.
    """
    states = adapted_states(model)
    exact = {one.what: f"{one.size} values (SHA-256 {one.digest.hex()}...)" for one in states}
    require_equal(facts | exact, what, name, ranks)
    # Machines may round differently in what they compute from the data.
    require_alike({one.what: [*one.numbers] for one in states if one.numbers}, what, ranks)


def fingerprints(variables: Sequence[Any]) -> np.ndarray:
    """Return a 64-bit fingerprint of each variable's bits, uint8 of shape (variables, 8)."""
    # Eager on purpose: a tf.function would be traced again for every model, for one call per epoch.
    rows = [tf.reshape(tf_variable(v).read_value(), [1, -1]) for v in variables]
    hashed = [tf.raw_ops.Fingerprint(data=row, method="farmhash64").numpy() for row in rows]
    return np.concatenate([np.zeros((0, 8), np.uint8), *hashed])


def check_replicas(
    model: keras.Model | None = None,
    optimizer: Any = None,
    *,
    variables: Sequence[Any] | None = None,
    when: str = "",
    process_set: hvd.ProcessSet | Communicator | None = None,
) -> None:
    """Check that every rank holds the same bits in every replicated variable. A collective.

    With a model, also what its layers have learnt with `adapt` outside their variables, such as a vocabulary.

    The cost is one pass over the variables (about 1 ms per 10 MB) and the vocabularies (1 s per million words), and one
    allgather of 8 bytes for each.

    A GPU adds the rows of an embedding's gradient that have the same index in any order, and so rounds differently on
    each rank. If GPUs are used and no variable differs by more than that, all take the values of the first rank.

    Args:
        model: Model whose weights, statistics and optimizer state are compared.
        optimizer: Optimizer whose state is also compared.
        variables: Variables to compare instead.
        when: Part of the message, such as "after epoch 3".
        process_set: Ranks to compare. Default: all.

    Raises:
        ReplicaError: On all ranks: a variable or a vocabulary differs. The message names the first one, and the ranks.
    """
    ranks = ranks_of(process_set)
    if ranks.size() == 1:
        return
    adapted: list[Adapted] = []
    if variables is None:
        variables = replicated_variables(model, optimizer, local_variables(model, optimizer))
        adapted = [] if model is None else adapted_states(model)
    digests = [np.frombuffer(one.digest, np.uint8)[None] for one in adapted]
    mine = np.concatenate([*digests, fingerprints(variables)])
    gathered = ranks.allgather(mine.reshape(1, -1), "hvdtrain_fingerprints")
    everyone = gathered.numpy().reshape(ranks.size(), -1, 8)
    drifted = np.flatnonzero((everyone != everyone[0]).any(axis=(0, 2)))
    if not drifted.size:
        return
    if drifted[0] < len(adapted):
        raise ReplicaError(
            _adapted_message(adapted[int(drifted[0])], everyone[:, drifted[0]], when, ranks)
        )
    everyone, drifted = everyone[:, len(adapted) :], drifted - len(adapted)
    apart = [variables[int(place)] for place in drifted]
    if any(ranks.exchange(_uses_gpu(), "hvdtrain_gpu")) and _are_rounded(apart, ranks):
        copy_variables(apart, ranks.ranks[0], ranks)
        return
    raise ReplicaError(_drift_message(variables, everyone, drifted, when, ranks))


def _uses_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def _are_rounded(variables: Iterable[Any], ranks: Communicator) -> bool:
    """Return whether the ranks' values differ only by rounding. A collective."""
    for variable in variables:
        gap, largest = _spread(variable, ranks)
        floating = tf_variable(variable).dtype.is_floating
        if not (floating and gap <= ROUNDING * largest < math.inf):
            return False
    return True


def _spread(variable: Any, ranks: Communicator) -> tuple[float, float]:
    """Return the largest difference between the ranks' values, and the largest absolute value. A collective."""
    value = tf.cast(tf_variable(variable).read_value(), tf.float64)
    # MPI, Gloo and NCCL may leave a nan out: the maximum of nan and 1 is 1.
    value = tf.where(tf.math.is_nan(value), tf.constant(math.inf, tf.float64), value)
    top = ranks.allreduce(value, "hvdtrain_drift_max", Max)
    bottom = ranks.allreduce(value, "hvdtrain_drift_min", Min)
    largest = tf.maximum(tf.abs(top), tf.abs(bottom))
    return float(tf.reduce_max(top - bottom)), float(tf.reduce_max(largest))


def _drift_message(
    variables: Sequence[Any],
    everyone: np.ndarray,
    drifted: np.ndarray,
    when: str,
    ranks: Communicator,
) -> str:
    """Return a message with the first variable that differs, the ranks, and by how much. A collective."""
    first = variables[int(drifted[0])]
    gap, _ = _spread(first, ranks)
    return (
        f"The replicas have drifted apart{' ' + when if when else ''}: variable {variable_name(first)!r} "
        f"{_whose(everyone[:, drifted[0]], ranks)} (by up to {gap:.3g}); {drifted.size} of {len(variables)} variables "
        "differ. Check that the gradients are reduced (hvdtrain.keras.DistributedOptimizer), that the initial values "
        "are broadcast, and that every rank builds the same model. If the variable is meant to differ, pass it to "
        "register_local_var."
    )


def _adapted_message(first: Adapted, everyone: np.ndarray, when: str, ranks: Communicator) -> str:
    return (
        f"The replicas differ{' ' + when if when else ''}: {first.what} {_whose(everyone, ranks)}. Adapt the layer to "
        "the same data on every rank, or give it the same values."
    )


def _whose(everyone: np.ndarray, ranks: Communicator) -> str:
    """Return whose fingerprint, of uint8 of shape (ranks, 8), differs from that of the first rank."""
    equal = (everyone == everyone[0]).all(axis=1)
    same = [rank for rank, alike in zip(ranks.ranks, equal, strict=True) if alike]
    others = [rank for rank in ranks.ranks if rank not in same]
    return f"of {_ranks(others)} differs from that of {_ranks(same)}"


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
