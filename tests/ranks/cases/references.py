"""What plain Keras computes for cases to be compared with: once a session, by one process.

`reference(compute)` stands for the dict that `compute` will return, and `.apart(found, part)` for how far `found` is
from a part of it. When a case has ended, its ranks share out the references that are not there yet; the test process
compares them with what the ranks found (see results.py). Every rank must ask for the same ones in the same order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import results
from results import Apart


@dataclass(frozen=True)
class Reference:
    """What `compute` returns, under the dtype policy that was set when it was asked for."""

    key: str
    compute: Callable[[], dict[str, Any]]
    policy: str

    def apart(self, found: Any, part: str, measure: str = "difference") -> Apart:
        """Stand for the distance of `found` from a part of the reference, by one of results.MEASURES."""
        return Apart(found, self.key, part, measure)


asked: dict[str, Reference] = {}
"""By the case that runs: this module is imported anew for each."""


def reference(
    compute: Callable[[], dict[str, Any]], *data: Any, name: str = "", any_size: bool = False
) -> Reference:
    """Return a reference that is computed later, in one process.

    Args:
        compute: returns a dict of numbers, arrays, lists and dicts of them; calls no collective.
        data: arrays, in any structure, that it depends on and that another run of the case may have otherwise.
        name: of one that several cases share; by default it is the case's own.
        any_size: the number of ranks makes no difference.
    """
    digest = hashlib.sha256()
    for array in keras.tree.flatten(data):
        digest.update(np.asarray(array).tobytes())
    size = "any" if any_size else str(hvd.size())
    own = f"{os.environ['TEST_CASE']}.{len(asked)}"
    key = f"{name or own}.{size}.{digest.hexdigest()[:16]}"
    policy = keras.config.dtype_policy().name
    return asked.setdefault(key, Reference(key, compute, policy))


def compute_all(folder: Path) -> None:
    """Write this rank's share of what the case asked for and none before it."""
    for number, one in enumerate(asked.values()):
        path = folder / f"{one.key}.json"
        if number % hvd.size() == hvd.rank() and not path.exists():
            keras.config.set_dtype_policy(one.policy)
            results.write(path, one.compute())
