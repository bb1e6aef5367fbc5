"""The random generators of a process that a training draws from: Python's, NumPy's global one, Keras's global one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.keras_internals.variables import global_seed_variable, tf_variable


def random_states() -> dict[str, Any]:
    """Return their states; what `encoding.encode` takes."""
    seed = global_seed_variable(create=False)
    version, numbers, gauss = random.getstate()
    return {
        "random": [version, np.array(numbers, np.uint32), gauss],
        "numpy": np.random.get_state(),
        "keras": None if seed is None else tf_variable(seed).numpy(),
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set what `random_states` returned; other entries are not looked at."""
    if states["keras"] is not None:
        tf_variable(global_seed_variable(create=True)).assign(states["keras"])
    # Last: Keras may have made its global generator of Python's random numbers just now.
    version, numbers, gauss = states["random"]
    random.setstate((version, tuple(map(int, numbers)), gauss))
    np.random.set_state(states["numpy"])
