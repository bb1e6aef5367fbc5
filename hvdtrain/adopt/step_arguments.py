"""Which arguments of a training step are a batch, and a rank's share of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.runtime import Rank
from hvdtrain.strategies.trial import varied

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class StepArguments:
    """The arguments of one call.

    Attributes:
        structure: (args, kwargs).
        leaves: What is in them, flattened.
        examples: Rows of the first array that has any: the batch. 0: there is none.
    """

    structure: Any
    leaves: list[Any]
    examples: int

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments:
        """Take them from a call."""
        leaves = tf.nest.flatten((args, kwargs))
        rows = [leaf.shape[0] for leaf in leaves if _is_array(leaf) and leaf.shape]
        return cls((args, kwargs), leaves, int(rows[0]) if rows else 0)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What two calls have in common that TensorFlow traces once; other objects count by identity."""
        return tuple(
            (tuple(leaf.shape), leaf.dtype.name)
            if _is_array(leaf)
            else leaf
            if isinstance(leaf, _PLAIN)
            else id(leaf)
            for leaf in self.leaves
        )

    def share(self, rank: Rank) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a rank's rows of each array that has as many as the batch.

        They are a multiple of the number of ranks.
        """
        each = self.examples // rank.size
        return self._with_batch(lambda leaf: leaf[rank.rank * each : (rank.rank + 1) * each])

    def varied(self) -> StepArguments | None:
        """Return the arguments with other labels and padding in some examples, as `trial.varied` does."""
        batch = [tf.convert_to_tensor(leaf) for leaf in self.leaves if self._is_of_batch(leaf)]
        found = varied(batch)
        if found is None:
            return None
        others = iter(found)
        args, kwargs = self._with_batch(lambda leaf: next(others))
        return StepArguments.of(args, kwargs)

    def _with_batch(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with each array changed that has as many rows as the batch."""
        found = [change(leaf) if self._is_of_batch(leaf) else leaf for leaf in self.leaves]
        args, kwargs = tf.nest.pack_sequence_as(self.structure, found)
        return args, kwargs

    def _is_of_batch(self, leaf: Any) -> bool:
        return _is_array(leaf) and leaf.shape[:1] == (self.examples,)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor | np.ndarray)
