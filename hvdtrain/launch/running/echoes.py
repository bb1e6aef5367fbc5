"""What several ranks say alike is shown once."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from hvdtrain.launch.running.noise import without_stamp

_LARGEST_MEMORY = 10_000


@dataclass
class Echoes:
    """Remembers the lines of a run, by their hashes: lines may be long."""

    _said: defaultdict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _shown: Counter[int] = field(default_factory=Counter)

    def is_echo(self, rank: int, line: bytes) -> bool:
        """Whether another rank's copy of what `rank` says has been shown: the k-th time that any
        rank says something is no echo, the k-th times of the others are."""
        text = hash(without_stamp(line))
        said = self._said[rank]
        said[text] += 1
        if said[text] <= self._shown[text]:
            return True
        self._shown[text] += 1
        if len(self._shown) > _LARGEST_MEMORY:
            self._shown.clear()
            self._said.clear()
        return False
