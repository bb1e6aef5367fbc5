"""Names of collectives that are the same on every rank, whatever else a rank did before.

Horovod matches the ranks' tensors by name, and waits forever for a name that one rank never submits. The numbers in
these names count only events that all ranks have in common: the first *use* of an optimizer, of a tuple of variables,
of a prefix in a graph. They do not depend on Keras's automatic names, on how often a function was traced (a rank with
a smaller last batch traces once more), or on objects that were created and never used.

The counters live as long as the process, as Horovod's own table of names does.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.keras_internals.variables import tf_variable

_instances = itertools.count()
_tuples = itertools.count()
_variable_tuples: dict[tuple[str, ...], int] = {}
_prefixes_in_graph: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


class InstanceName:
    """Name of an object's collectives, numbered at its first use, not at its creation.

    Args:
        kind: Part of the name, such as "gradient".
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._number: int | None = None

    def __call__(self, variables: Sequence[Any]) -> str:
        del variables
        if self._number is None:
            self._number = next(_instances)
        return f"hvdtrain_{self._kind}_{self._number}"


def variables_name(variables: Sequence[Any]) -> str:
    """Return the name for a tuple of variables: every step creates a new tape, but not new variables."""
    # A _unique_id is never used twice; Python reuses the id() of an object that was deleted, which may happen on one
    # rank and not on another. A watched tensor exists for one step only, and is known by its position.
    key = tuple(getattr(tf_variable(v), "_unique_id", "tensor") for v in variables)
    if key not in _variable_tuples:
        _variable_tuples[key] = next(_tuples)
    return f"hvdtrain_tape_{_variable_tuples[key]}"


def in_this_graph(prefix: str) -> str:
    """Return `prefix`, with a number appended if it has been used before in the graph that is being traced.

    The collectives of a graph may run at the same time, and then need different names.
    """
    if tf.executing_eagerly():
        return prefix
    graph = tf.compat.v1.get_default_graph()
    seen = _prefixes_in_graph.setdefault(graph, Counter())
    seen[prefix] += 1
    return prefix if seen[prefix] == 1 else f"{prefix}_again{seen[prefix] - 1}"
