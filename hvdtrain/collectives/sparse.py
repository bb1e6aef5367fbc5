"""Reduction of sparse gradients (IndexedSlices) to the slices that one process with the whole batch would have.

The slices themselves matter, not only their sum by index: operations that are not linear in a gradient (Adam squares
it, clipnorm takes its norm) work slice by slice, in plain Keras too. An embedding lookup of the data makes a slice for
each index in the data: the slices of all ranks, concatenated, are those of the whole batch. A lookup of other indices
(positions 0, 1, 2, ... of a sequence, a table of relative positions) may be done once per batch, and each of its
slices is a sum over the examples: then the ranks' slices are added up, which also sends fewer bytes (an allreduce of
the values). If positions are looked up for each example, they make as many slices as the data does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator, Max, Min
from hvdtrain.keras_internals.corrections import outside_clusters

Rows: TypeAlias = tuple[int, ...]
"""The indices of slices."""

_ONLY_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
_OTHER_ON_EACH_RANK = ("Iterator", "PyFunc", "EagerPyFunc", "Random", "Stateless", "Multinomial")
"""Prefixes of the types of operations whose results differ between ranks even if their inputs are equal."""


def sum_slices(
    slices: tf.IndexedSlices, ranks: Communicator, name: str, once: bool | None = None
) -> tf.IndexedSlices:
    """Return the sum of the ranks' slices, as the slices of one process with all of their examples. A collective.

    Args:
        slices: Gradient of this rank.
        ranks: Ranks to sum over.
        name: First part of the collectives' names.
        once: Whether the number of slices is independent of the batch size; None: determine it from the graph.
    """
    if tf.executing_eagerly():
        joined = _behind_each_other(slices, ranks, name)
        count = _run_of_all(joined.indices, ranks)
        is_mine = int(
            slices.indices.shape[0] == count
        )  # [0, 1, 0] and [1] only look like two runs.
        if not (count and ranks.allreduce(is_mine, f"{name}_count", Min)):
            return joined
        values = tf.reshape(joined.values, [ranks.size(), count, *slices.values.shape[1:]])
        return tf.IndexedSlices(tf.reduce_sum(values, 0), slices.indices, slices.dense_shape)
    if once is False or follows_data(slices.indices):
        return _behind_each_other(slices, ranks, name)
    if once and slices.values.shape.is_fully_defined():
        total = ranks.allreduce(slices.values, f"{name}_values")
        return tf.IndexedSlices(total, slices.indices, slices.dense_shape)
    with outside_clusters():
        return _by_place(slices, ranks, name, once or _are_made_once(slices.indices))


def _by_place(
    slices: tf.IndexedSlices, ranks: Communicator, name: str, once: bool | tf.Tensor
) -> tf.IndexedSlices:
    """Add up the first slices of all ranks, the second ones and so on, if they are made once for a batch.

    Otherwise join them, also if the indices differ between ranks (constants: a row for each of several data sets). The
    ranks decide it together: their graphs may differ, for instance in a last batch of another size.
    """
    joined = _behind_each_other(slices, ranks, name)
    count, total = tf.size(slices.indices), tf.size(joined.indices)
    own = tf.range(total) % tf.maximum(count, 1)
    # With one index more, as there may be none.
    mine = tf.gather(tf.pad(slices.indices, [[0, 1]]), own)
    alike = tf.logical_and(once, tf.reduce_all(joined.indices == mine))
    facts = tf.stack([tf.cast(alike, tf.int32), count, -count])
    agreed = ranks.allreduce(facts, f"{name}_once", Min)
    together = tf.logical_and(agreed[0] > 0, agreed[1] == -agreed[2])
    places = tf.where(together, own, tf.range(total))
    length = tf.where(together, count, total)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(joined.values, places, length),
        tf.math.unsorted_segment_max(joined.indices, places, length),
        slices.dense_shape,
    )


def _are_made_once(indices: tf.Tensor) -> bool | tf.Tensor:
    """Whether indices that do not follow the data are looked up once for a batch, in place of once for each example.

    In a graph for batches of any size their number tells. Otherwise, indices for each example are the same ones as
    often as there are examples; with one example, both are the same, and the former is more usual.
    """
    # Not of the indices' graph: they may be an eager constant.
    batches = _batches(tf.compat.v1.get_default_graph())
    if any(one.shape[0] is None for one in batches):
        if indices.shape.is_fully_defined():
            return True
        if all(one.shape[1:].is_fully_defined() for one in batches):
            return False
    sizes = {one.shape[0] or id(one): one for one in batches}.values()
    repeated = [_is_repeated(indices, one.shape[0] or tf.shape(one)[0]) for one in sizes]
    return tf.logical_not(tf.reduce_any(repeated)) if repeated else True


def _is_repeated(indices: tf.Tensor, times: Any) -> tf.Tensor:
    """Whether `indices` are a part of them, two `times` or more often."""
    count = tf.size(indices)
    part = tf.maximum(count // tf.maximum(times, 1), 1)
    same = tf.reduce_all(indices == tf.gather(indices, tf.range(count) % part))
    return tf.reduce_all([times >= 2, count % tf.maximum(times, 1) == 0, same])


def _batches(graph: Any) -> list[tf.Tensor]:
    """Return what a graph takes as data: arguments of one dimension or more, and what it reads from iterators.

    Branches of tf.cond, in which loss scaling applies gradients, only have captures: the batch is an argument outside.
    A function with arguments of its own must not capture what is outside: its trace serves other callers, too.
    """
    found: list[tf.Tensor] = []
    while graph is not None and not found:
        captured = {id(inside) for _, inside in getattr(graph, "captures", ())}
        given = [one for one in getattr(graph, "inputs", ()) if id(one) not in captured]
        for operation in graph.get_operations():
            given += operation.outputs if operation.type.startswith("Iterator") else ()
        found = [one for one in given if one.shape.rank and one.dtype != tf.resource]
        graph = getattr(graph, "outer_graph", None)
    return found


def follows_data(tensor: tf.Tensor) -> bool:
    """Whether the values of a graph's tensor may depend on the inputs of the graph, and so on the rank's examples.

    A dependence on shapes or variables does not count; variables are equal on all ranks. The result of a function call
    is taken to depend on all of its inputs.
    """
    waiting: list[Any] = [tensor]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, tf.__internal__.EagerTensor) or id(one) in seen:
            continue
        seen.add(id(one))
        operation = one.op
        if operation.type == "Placeholder":
            captured = _captured(one)
            if captured is None:
                return one.dtype != tf.resource
            waiting.append(captured)
        elif operation.type.startswith(_OTHER_ON_EACH_RANK):
            return True
        elif operation.type not in _ONLY_SHAPES:
            waiting += operation.inputs
    return False


def _captured(placeholder: tf.Tensor) -> Any:
    """Return the outer tensor that a tf.function captured as `placeholder`; None for an argument."""
    for outside, inside in getattr(placeholder.graph, "captures", ()):
        if inside is placeholder:
            return outside
    return None


def are_made_once(slices: tf.IndexedSlices) -> bool:
    """Whether slices are made once for a batch; in a graph for any number of examples, of otherwise known shapes."""
    return not follows_data(slices.indices) and _are_made_once(slices.indices) is True


def add_slices(one: tf.IndexedSlices, other: tf.IndexedSlices, once: bool) -> tf.IndexedSlices:
    """Return the sum of the gradients of two parts of a batch, as the slices of one batch.

    Args:
        one: Gradient of one part.
        other: Gradient of the other.
        once: Whether they are made once for a batch (`are_made_once`); then the parts have the same indices.
    """
    if once:
        return tf.IndexedSlices(one.values + other.values, one.indices, one.dense_shape)
    return tf.IndexedSlices(
        tf.concat([one.values, other.values], axis=0),
        tf.concat([one.indices, other.indices], axis=0),
        one.dense_shape,
    )


def common_indices(slices: Mapping[int, tf.IndexedSlices], ranks: Communicator) -> dict[int, Rows]:
    """Return the indices that are the same on all ranks, by the keys of `slices`. A collective, outside of graphs.

    Args:
        slices: Gradients of this rank, with the same keys on all ranks.
        ranks: Ranks to compare.
    """
    if not slices:
        return {}
    mine = {key: tuple(one.indices.numpy().tolist()) for key, one in slices.items()}
    digests = np.array([_digest(rows) for rows in mine.values()])
    both = np.stack([digests, -digests])
    largest, least = ranks.allreduce(both, "hvdtrain_rows_made_once", Max).numpy()
    alike = zip(mine.items(), largest == -least, strict=True)
    return {key: rows for (key, rows), same in alike if same}


def _digest(rows: Rows) -> int:
    found = hashlib.blake2b(np.array(rows, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(found, "big") >> 2  # Fits int64, also negated.


def _behind_each_other(
    slices: tf.IndexedSlices, ranks: Communicator, name: str
) -> tf.IndexedSlices:
    values = ranks.allgather(slices.values, f"{name}_values")
    indices = ranks.allgather(slices.indices, f"{name}_indices")
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _run_of_all(gathered: tf.Tensor, ranks: Communicator) -> int:
    """Return the length of the run of indices that all ranks seem to have looked up, each once; 0 if there is none.

    It is all that can be known eagerly.
    """
    count, rest = divmod(int(tf.size(gathered)), ranks.size())
    if rest or count < 2:
        return 0
    rows = tf.reshape(gathered, [ranks.size(), count]).numpy()
    return count if (rows == rows[0]).all() and (np.diff(rows[0]) == 1).all() else 0
