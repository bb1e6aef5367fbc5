"""LocalSGD and DiLoCo: how often the ranks of `Trainer(sync=...)` meet, and what they do then."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal

from hvdtrain.errors import UsageError, require_integer

WIRES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class LocalSGD:
    """Each rank trains alone; after every so many steps the weights and the optimizer's state are averaged.

    McMahan et al. 2017 (arXiv:1602.05629), Stich 2019 (arXiv:1805.09767). A rank counts in the average by the examples
    that it has trained on in the round. With SGD, also with momentum, `every=1` is synchronous training while
    every rank has examples in each step.

    Args:
        every: number of steps in a round. A round also ends with the epoch.

    Raises:
        UsageError: `every` is not a positive integer.
    """

    every: int

    def __post_init__(self) -> None:
        require_integer("LocalSGD: every", self.every)


@dataclass(frozen=True)
class DiLoCo:
    """Each rank trains alone; after every so many steps an outer optimizer applies the average change of the weights.

    Douillard et al. 2023 (arXiv:2311.08105). With the weights w at the begin of a round, and the average change d of
    the ranks, weighted by their examples in the round: m = outer_momentum * m + d, and the next round begins at
    w + outer_learning_rate * (d + outer_momentum * m), Nesterov's momentum. The state of the model's own optimizer
    stays on its rank, as in the paper.

    Args:
        every: number of steps in a round. A round also ends with the epoch.
        outer_learning_rate: of the outer optimizer; 1, with outer_momentum=0, averages the weights.
        outer_momentum: of the outer optimizer, at least 0 and less than 1.
        exchange: how the change travels: "float32"; "bfloat16", half of the bytes; or "int8", about a quarter,
            in blocks of 256 numbers that have a scale each. Sums are made in float32.

    Raises:
        UsageError: a value is out of range.
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
