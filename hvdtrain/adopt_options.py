"""What a user may choose for `hvdtrain run --adopt`, and the words that tell a rank.

By default the result is that of one process, which larger batches change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Batch = Literal["global", "per-worker"]
Scaling = Literal["none", "linear", "sqrt"]
BATCHES, SCALINGS = get_args(Batch), get_args(Scaling)


@dataclass(frozen=True)
class AdoptOptions:
    """Options of `python -m hvdtrain.adopt`.

    Attributes:
        batch: "global": the workers share each batch of the script. "per-worker": each of them has a whole one.
        learning_rate: Factor for the learning rate, as `learning_rate_scaling` of a Trainer.
        explain: Whether rank 0 tells of everything that is done otherwise than on one process.
    """

    batch: Batch = "global"
    learning_rate: Scaling = "none"
    explain: bool = False

    def words(self) -> tuple[str, ...]:
        """Return the options as words of a command line, without those at their defaults."""
        batch = ("--batch", self.batch) if self.batch != "global" else ()
        rate = ("--learning-rate", self.learning_rate) if self.learning_rate != "none" else ()
        return (*batch, *rate, *(["--explain"] if self.explain else []))
