"""Which ranks hold what of a model that is divided: over whom gradients are reduced, and norms added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.collectives.communicator import Communicator


@dataclass(frozen=True)
class Holders:
    """The ranks over which one variable's gradient is reduced, where those are not all of the reduction's.

    Args:
        process_set: the ranks.
        copies: how many of them have computed each example.
    """

    process_set: Communicator
    copies: int = 1


def _in_no_parts(variable: Any) -> Sequence[Communicator]:
    del variable
    return ()


def _held_by_all(variable: Any) -> Holders | None:
    del variable
    return None


@dataclass(frozen=True)
class NormSets:
    """Over which ranks the squares of a gradient add up to those of the whole.

    Args:
        parts: for a variable: the process sets over which its parts lie; none: this rank holds all of it.
        rest: the process sets over which the model's other variables lie.
    """

    parts: Callable[[Any], Sequence[Communicator]] = _in_no_parts
    rest: Sequence[Communicator] = ()


@dataclass(frozen=True)
class Divided:
    """How a model lies on the ranks; the defaults: each rank holds all of it.

    Attributes:
        holders: for a variable, the ranks that hold it, if those are others than the reduction's.
        everyone: the ranks that hold parts of the model; default those of the reduction.
        norms: over which ranks squares add up; None: gradients are whole.
    """

    holders: Callable[[Any], Holders | None] = _held_by_all
    everyone: Communicator | None = None
    norms: NormSets | None = None
