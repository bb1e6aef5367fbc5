"""Names of the processes of a launch: rank numbers, or roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProcessNames:
    """Names of a launch's processes in its output, log folder and messages.

    Attributes:
        roles: Name of each process, the one of most interest to the user first. If empty, the processes are ranks.
        tagged: Whether the launch tags each line with its process. If not, there is only one process.
        starter: Name in messages of the program that starts the ranks.
    """

    roles: tuple[str, ...] = ()
    tagged: bool = True
    starter: str = field(default="horovodrun", compare=False)

    def name(self, number: int) -> str:
        """Return the name for messages."""
        return self._role(number) or f"rank {number}"

    def folder(self, number: int) -> str:
        """Return the name of the process's folder in the log folder."""
        return self._role(number) or f"rank.{number}"

    def label(self, number: int) -> str:
        """Return the label in front of the process's lines."""
        return self._role(number) or str(number)

    def is_vital(self, number: int) -> bool:
        """Return whether the run fails if this process fails: any rank, but only the first of several roles."""
        return not self.roles or number == 0

    def _role(self, number: int) -> str:
        return self.roles[number] if number < len(self.roles) else ""


RANKS = ProcessNames()
RANKS_OF_SRUN = ProcessNames(starter="hvdtrain.start.run_srun, which runs srun,")
ALONE = ProcessNames(tagged=False)
"""One process, without a launcher."""


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Format rank numbers: `rank 2`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
