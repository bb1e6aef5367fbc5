"""Where the examples of a global batch go: rows of equal number on every replica, filled up where they lack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdtrain.data.share import split


@dataclass(frozen=True)
class Placement:
    """A global batch laid out over replicas.

    Attributes:
        rows: which example of the batch stands in each row, int32 of shape (replicas, rows).
        real: how many of each replica's first rows count; the others repeat examples.
    """

    rows: np.ndarray
    real: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """Whether every row counts."""
        return min(self.real) == self.rows.shape[1]

    @property
    def mask(self) -> np.ndarray:
        """1 for each row that counts, else 0: float32 of shape (replicas, rows)."""
        return (np.arange(self.rows.shape[1]) < np.array(self.real)[:, None]).astype(np.float32)

    @property
    def weights(self) -> np.ndarray:
        """Each replica's part of an average over those that have an example: float32 of shape (replicas,)."""
        busy = np.array(self.real) > 0
        return (busy / busy.sum()).astype(np.float32)


def place(examples: int, replicas: int, rows: int) -> Placement:
    """Lay `examples` out in their order; a replica fills up by repeating its own, an idle one the batch's first.

    Args:
        examples: at least 1, at most replicas x rows.
    """
    assert 1 <= examples <= replicas * rows, (examples, replicas, rows)
    parts = [split(examples, replica, replicas) for replica in range(replicas)]
    # Repeated in turn, so that statistics of the rows are about those of the examples.
    table = [begin + np.arange(rows) % max(1, end - begin) for begin, end in parts]
    clipped = np.minimum(np.stack(table), examples - 1).astype(np.int32)
    return Placement(clipped, tuple(end - begin for begin, end in parts))
