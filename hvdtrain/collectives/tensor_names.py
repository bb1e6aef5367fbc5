"""Names of collectives that are the same on every rank, whatever else a rank did before.

Horovod matches the ranks' tensors by name, and waits forever for a name that one rank never submits. The numbers in
these names count only events that all ranks have in common: the first *use* of an optimizer, of a tuple of variables,
of a prefix in a graph. They do not depend on Keras's automatic names, on how often a function was traced (a rank with
a smaller last batch traces once more), or on objects that were created and never used. They are counted for each
process set, whose events its members have in common; Horovod keeps the names of each set apart.

A worker that joins an elastic job later has not seen the first uses of the others. What the job's state holds is
therefore named by its place in there: see `name_by_places`.

The counters live as long as the process, as Horovod's own table of names does.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from hvdtrain.keras_internals.variables import tf_variable

Group = tuple[int, ...]
"""Members of a process set; () for the global one."""

_Counters: TypeAlias = defaultdict[Any, Iterator[int]]

_instances: _Counters = defaultdict(itertools.count)
_tuples: _Counters = defaultdict(itertools.count)
_variable_tuples: dict[tuple[Group, tuple[str, ...]], int] = {}
_places: dict[Any, int] = {}
"""Place of each InstanceName, and of each variable by its id, in the state of an elastic job."""
_prefixes_in_graph: weakref.WeakKeyDictionary[Any, _Counters] = weakref.WeakKeyDictionary()


class Ranks(Protocol):
    """The ranks of a process set."""

    @property
    def ranks(self) -> list[int]: ...

    def is_global(self) -> bool: ...


def _group_of(ranks: Ranks) -> Group:
    # The global set is the same one if its members change.
    return () if ranks.is_global() else tuple(ranks.ranks)


class InstanceName:
    """Name of an object's collectives, numbered at its first use, not at its creation.

    Args:
        kind: Part of the name, such as "gradient".
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._number: int | None = None

    def __call__(self, variables: Sequence[Any], ranks: Ranks) -> str:
        del variables
        if self in _places:
            return f"hvdtrain_{self._kind}_state_{_places[self]}"
        if self._number is None:
            self._number = next(_instances[_group_of(ranks)])
        return f"hvdtrain_{self._kind}_{self._number}"


def variables_name(variables: Sequence[Any], ranks: Ranks) -> str:
    """Return the name for a tuple of variables: every step creates a new tape, but not new variables."""
    # A _unique_id is never used twice; Python reuses the id() of an object that was deleted, which may happen on one
    # rank and not on another. A watched tensor exists for one step only, and is known by its position.
    group = _group_of(ranks)
    key = group, tuple(map(_id_of, variables))
    if all(one in _places for one in key[1]):
        places = ",".join(str(_places[one]) for one in key[1])
        return f"hvdtrain_tape_state_{hashlib.sha256(places.encode()).hexdigest()[:12]}"
    if key not in _variable_tuples:
        _variable_tuples[key] = next(_tuples[group])
    return f"hvdtrain_tape_{_variable_tuples[key]}"


def name_by_places(instances: Iterable[InstanceName], variables: Iterable[Any]) -> None:
    """Let names no longer depend on what this process did before, for the state of an elastic job.

    Call it on every worker whenever the state is sent to all, and without a state when workers join or leave. What was
    traced before must be traced again.

    Args:
        instances: Names of the objects in the state, in the same order on every worker.
        variables: Variables of the state, likewise.
    """
    _places.clear()
    _places.update((instance, place) for place, instance in enumerate(instances))
    _places.update((_id_of(variable), place) for place, variable in enumerate(variables))


def is_named_by_places() -> bool:
    """Whether all workers of an elastic job have the same state, since workers last joined or left."""
    return bool(_places)


def _id_of(variable: Any) -> str:
    return str(getattr(tf_variable(variable), "_unique_id", "tensor"))


def in_this_graph(prefix: str, ranks: Ranks) -> str:
    """Return `prefix`, with a number appended if `ranks` have used it before in the graph that is being traced.

    The collectives of a graph may run at the same time, and then need different names. Those of a process set have its
    members in their names: Horovod takes the names of a graph's nodes, which TensorFlow numbers if they are alike.
    """
    if tf.executing_eagerly():
        return prefix
    graph, group = tf.compat.v1.get_default_graph(), _group_of(ranks)
    counters = _prefixes_in_graph.setdefault(graph, defaultdict(itertools.count))
    before = next(counters[group, prefix])
    name = f"{prefix}_of_{runs_of(group)}" if group else prefix
    return f"{name}_again{before}" if before else name


def runs_of(numbers: Sequence[int]) -> str:
    """Return numbers in short and in ascending order: "2_4-6" for 6, 5, 4, 2."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return "_".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in found)
