"""Placement of variables on servers: large ones are split over several, and loads are balanced by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.keras_internals.optimizers import optimizer_slots
from hvdtrain.keras_internals.remote_variables import (
    SplitVariable,
    may_be_split,
    replace_value,
    split_value,
    step_constants,
    tf_variables,
    update_where_variables_are,
)
from hvdtrain.keras_internals.variables import unique

MIN_PART_BYTES = 256 * 1024
"""Below this size, one more server costs more than it saves (TensorFlow's guide recommends the same limit)."""


@dataclass(frozen=True)
class Item:
    """A variable to place: its number of rows, its size in bytes, and whether it may be split."""

    rows: int
    size: int
    splittable: bool


def plan(items: Sequence[Item], servers: int, min_part: int = MIN_PART_BYTES) -> list[list[int]]:
    """Return the servers of the parts of each item, in the order of the rows.

    Greedy: the largest items come first, and each takes the servers with the smallest load so far.

    Args:
        items: Variables to place.
        servers: Number of servers.
        min_part: Smallest size of a part, in bytes.
    """
    load = [0.0] * servers
    result: list[list[int]] = [[] for _ in items]
    for number in sorted(range(len(items)), key=lambda n: -items[n].size):
        item = items[number]
        parts = max(1, min(servers, item.rows, item.size // min_part)) if item.splittable else 1
        chosen = sorted(range(servers), key=lambda server: load[server])[:parts]
        result[number] = sorted(chosen)
        for server in chosen:
            load[server] += item.size / parts
    return result


def part_sizes(rows: int, parts: int) -> list[int]:
    """Return the number of rows of each part; they differ by at most one, the larger ones first."""
    return [rows // parts + (number < rows % parts) for number in range(parts)]


def move_to_servers(
    model: keras.Model, optimizer: Any, servers: int, min_part: int = MIN_PART_BYTES
) -> None:
    """Move the variables of a built model and of its built optimizer, with their values, to the servers.

    Optimizer state is placed with its weight, part by part. Values that are arguments of a step (its number, the
    learning rate) stay on this process.

    Args:
        model: Built model.
        optimizer: Built optimizer.
        servers: Number of servers.
        min_part: Smallest size of a part, in bytes.
    """
    trained = list(model.trainable_variables)
    of_weight = {id(weight): slots for weight, slots in optimizer_slots(optimizer)}
    here = {id(v) for v in step_constants(optimizer)}
    here |= {id(slot) for slots in of_weight.values() for slot in slots}
    rest = [v for v in [*model.variables, *optimizer.variables] if id(v) not in here]
    wanted = [v for v in unique([*trained, *rest]) if not _is_moved(v)]
    splittable = {id(v) for v in trained} if may_be_split(optimizer) else set()
    places = plan([_item(v, splittable) for v in wanted], servers, min_part)
    for variable, place in zip(wanted, places, strict=True):
        for mine in (variable, *of_weight.get(id(variable), ())):
            _move(mine, place, variable)
    update_where_variables_are(optimizer)


def _item(variable: Any, splittable: set[int]) -> Item:
    shape = tuple(variable.shape)
    size = variable.value.dtype.size * max(1, variable.value.shape.num_elements())
    return Item(shape[0] if shape else 1, size, id(variable) in splittable and len(shape) > 1)


def _move(variable: Any, place: Sequence[int], weight: Any) -> None:
    """Move a variable to the servers `place`; state of another shape than its weight's is not split."""
    value = variable.value.read_value()
    if len(place) == 1 or tuple(variable.shape) != tuple(weight.shape):
        replace_value(variable, _on_server(place[0], value, variable))
        return
    pieces = tf.split(value, part_sizes(int(variable.shape[0]), len(place)))
    parts = [
        _on_server(server, piece, variable) for server, piece in zip(place, pieces, strict=True)
    ]
    split_value(variable, parts, _on_server(place[0], tf.zeros([], value.dtype), variable))


def _on_server(server: int, value: tf.Tensor, variable: Any) -> tf.Variable:
    with tf.init_scope(), tf.device(f"/job:ps/replica:0/task:{server}/device:CPU:0"):
        return tf.Variable(value, trainable=variable.trainable, name=variable.name)


def _is_moved(variable: Any) -> bool:
    return isinstance(variable, SplitVariable) or "/job:ps" in tf_variables(variable)[0].device
