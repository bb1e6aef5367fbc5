"""What a rank sets in its environment before TensorFlow is loaded.

TensorFlow and OpenMP each start as many threads as the machine has cores, in every rank. Two ranks
on two cores then run four compute threads, and the ranks wait for each other's time slices:
dividing the cores between the ranks of a host is worth up to a factor of two. Everything here is a
default: what the user has set already stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdtrain.environment import RANK_CORES, STALL_DEFAULTS
from hvdtrain.rank_variables import local_size_of


def available_cores() -> int:
    """Cores that this process may run on (its affinity mask, not the machine's total)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the variables to add to `environ`; none that is already set there.

    `cores` are those that all ranks of this host share. Each rank computes with an equal share, at
    least one, or with as many as its launcher says are its own. More inter-op threads than cores
    cost time: with 2 in place of 1, two ranks on two cores were 1.05 to 1.4 times slower on a small
    network. Collectives need no thread to wait in.
    """
    own = environ.get(RANK_CORES, "")
    share = max(1, int(own) if own.isdecimal() else cores // max(1, local_size_of(environ)))
    defaults = {
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "OMP_NUM_THREADS": str(share),
        "TF_NUM_INTRAOP_THREADS": str(share),
        "TF_NUM_INTEROP_THREADS": str(share),
        # UCX takes SIGHUP, the end of a terminal, for a wish to be debugged: the rank would live on.
        "UCX_DEBUG_SIGNO": "0",
        **STALL_DEFAULTS,
    }
    return {name: value for name, value in defaults.items() if name not in environ}
