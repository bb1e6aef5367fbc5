"""Names of collectives that are the same on every rank, whatever else a rank did before.

Horovod pairs the ranks' tensors by name, and waits forever for a name that one rank never submits. A name
here counts only what the ranks do in common: the first *use* of an optimizer, of a tuple of variables, of
a prefix in a graph. Nothing depends on Keras's automatic names, on how often a function was traced (a
rank with a smaller last batch traces once more), or on objects that were made and never used.

The counts live as long as the process, as Horovod's own table of names does.
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
    """A name for each object: numbered when it is first asked for, not when it is made."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._number: int | None = None

    def __call__(self, variables: Sequence[Any]) -> str:
        del variables
        if self._number is None:
            self._number = next(_instances)
        return f"hvdtrain_{self._kind}_{self._number}"


def variables_name(variables: Sequence[Any]) -> str:
    """Return a name for each tuple of variables: every step makes a new tape, but not new variables."""
    # TensorFlow never gives a _unique_id twice; Python's id() is given again when an object dies,
    # which may happen on one rank and not on another.
    # A watched tensor has neither a life nor a name beyond its step: its place is enough.
    key = tuple(getattr(tf_variable(v), "_unique_id", "tensor") for v in variables)
    if key not in _variable_tuples:
        _variable_tuples[key] = next(_tuples)
    return f"hvdtrain_tape_{_variable_tuples[key]}"


def in_this_graph(prefix: str) -> str:
    """Return `prefix` with how often it came before in the graph that is being traced.

    The collectives of one graph may run at the same time, and then need names of their own.
    """
    if tf.executing_eagerly():
        return prefix
    graph = tf.compat.v1.get_default_graph()
    seen = _prefixes_in_graph.setdefault(graph, Counter())
    seen[prefix] += 1
    return prefix if seen[prefix] == 1 else f"{prefix}_again{seen[prefix] - 1}"
