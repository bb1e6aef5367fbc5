"""States of a process's global random generators: Python's, NumPy's and Keras's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.data.random_generators import IN_USE, NUMPY, PYTHON
from hvdtrain.keras_internals.variables import global_seed_variable, tf_variable


def random_states() -> dict[str, Any]:
    """Return the states, in types that `encoding.encode` accepts."""
    seed = global_seed_variable(create=False)
    with IN_USE:
        (version, numbers, gauss), numpy = PYTHON.state(), NUMPY.state()
    return {
        "random": [version, np.array(numbers, np.uint32), gauss],
        "numpy": numpy,
        "keras": None if seed is None else tf_variable(seed).numpy(),
    }


def set_random_states(states: Mapping[str, Any], everyones: bool = True) -> None:
    """Restore what `random_states` returned; other entries of `states` are ignored.

    Args:
        states: Includes the saved states.
        everyones: Whether to restore the generators of Python and NumPy, which other threads use, too.
    """
    if states["keras"] is not None:
        tf_variable(global_seed_variable(create=True)).assign(states["keras"])
    if not everyones:
        return
    # Last, as Keras may just have seeded a new global generator from Python's random numbers.
    version, numbers, gauss = states["random"]
    with IN_USE:
        PYTHON.restore((version, tuple(map(int, numbers)), gauss))
        NUMPY.restore(states["numpy"])
