"""LocalSGD and DiLoCo: how often, and how, ranks synchronize their weights with `Trainer(sync=...)`."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal

from hvdtrain.errors import UsageError, require_integer

WIRES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class LocalSGD:
    """Local SGD: ranks train independently, and average weights and optimizer state after every `every` steps.

    McMahan et al. 2017 (arXiv:1602.05629), Stich 2019 (arXiv:1805.09767). The average is weighted by the number of
    examples that each rank trained on in the round. For SGD, with or without momentum, `every=1` is equivalent to
    synchronous training while every rank has examples in each step.

    Args:
        every: Number of steps in a round. A round also ends with the epoch.

    Raises:
        UsageError: If `every` is not a positive integer.
    """

    every: int

    def __post_init__(self) -> None:
        require_integer("LocalSGD: every", self.every)


@dataclass(frozen=True)
class DiLoCo:
    """DiLoCo: ranks train independently; after every `every` steps an outer optimizer applies their average change.

    Douillard et al. 2023 (arXiv:2311.08105). Let w be the weights at the beginning of a round, and d their change in
    the round, averaged over the ranks and weighted by their examples. The outer optimizer is SGD with Nesterov
    momentum: m = outer_momentum * m + d, and the next round begins at
    w + outer_learning_rate * (d + outer_momentum * m). As in the paper, the state of the model's own optimizer is not
    averaged.

    Args:
        every: Number of steps in a round. A round also ends with the epoch.
        outer_learning_rate: Learning rate of the outer optimizer; 1, with outer_momentum=0, averages the weights.
        outer_momentum: Momentum of the outer optimizer, at least 0 and less than 1.
        exchange: Format in which changes are sent: "float32"; "bfloat16", half of the bytes; or "int8", about a
            quarter, in blocks of 256 numbers with a scale each. Sums are computed in float32.

    Raises:
        UsageError: If `every` is not a positive integer, or another value is out of range.
    """

    every: int
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    exchange: Literal["float32", "bfloat16", "int8"] = "float32"

    def __post_init__(self) -> None:
        require_integer("DiLoCo: every", self.every)
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        if not (isinstance(rate, Real) and rate > 0):
            raise UsageError(f"DiLoCo: outer_learning_rate={rate!r}: pass a positive number")
        if not (isinstance(momentum, Real) and 0 <= momentum < 1):
            raise UsageError(
                f"DiLoCo: outer_momentum={momentum!r}: pass a number from 0 to below 1"
            )
        if self.exchange not in WIRES:
            raise UsageError(
                f"DiLoCo: exchange={self.exchange!r}: choose one of {', '.join(map(repr, WIRES))}"
            )
