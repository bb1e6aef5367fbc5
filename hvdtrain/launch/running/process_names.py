"""Names of the processes of a launch: ranks by number, others by role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProcessNames:
    """The processes of a launch, as its output, its log folder and its messages name them.

    Attributes:
        roles: a name for each process, the one that the user watches first; empty: ranks.
        tagged: whether the launch marks each line with its process; else there is only one.
        starter: what messages call the program that starts ranks.
    """

    roles: tuple[str, ...] = ()
    tagged: bool = True
    starter: str = field(default="horovodrun", compare=False)

    def name(self, number: int) -> str:
        """In a message."""
        return self._role(number) or f"rank {number}"

    def folder(self, number: int) -> str:
        """Of its output, in the log folder."""
        return self._role(number) or f"rank.{number}"

    def label(self, number: int) -> str:
        """In front of its lines."""
        return self._role(number) or str(number)

    def is_vital(self, number: int) -> bool:
        """Whether the run fails if this process fails: true for every rank, but only for the first of several roles."""
        return not self.roles or number == 0

    def _role(self, number: int) -> str:
        return self.roles[number] if number < len(self.roles) else ""


RANKS = ProcessNames()
RANKS_OF_SRUN = ProcessNames(starter="hvdtrain.start.run_srun, which runs srun,")
ALONE = ProcessNames(tagged=False)
"""One process, without a launcher."""


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
