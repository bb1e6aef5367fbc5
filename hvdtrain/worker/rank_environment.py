"""Environment variables that a rank sets before TensorFlow is loaded.

TensorFlow and OpenMP each start as many threads as the machine has cores, in every rank. Two ranks on two cores then
run four compute threads, and wait for each other's time slices: dividing the cores between the ranks of a host makes
them up to twice as fast. All variables here are defaults: those that the user has set are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.environment import RANK_CORES, STALL_DEFAULTS
from hvdtrain.rank_variables import local_size_of


def rank_environment(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the variables to add to `environ`, for ranks that share so many cores of a host; none that is set already.

    Each rank computes on an equal share of the cores, at least one, or on the number that its launcher has assigned.
    More inter-op threads than cores cost time: with 2 instead of 1, two ranks on two cores were 1.05 to 1.4 times
    slower on a small network. Collectives need no thread to wait in.
    """
    own = environ.get(RANK_CORES, "")
    share = max(1, int(own) if own.isdecimal() else cores // max(1, local_size_of(environ)))
    defaults = {
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "OMP_NUM_THREADS": str(share),
        "TF_NUM_INTRAOP_THREADS": str(share),
        "TF_NUM_INTEROP_THREADS": str(share),
        # On SIGHUP, the end of a terminal, UCX waits for a debugger: the rank would not end.
        "UCX_DEBUG_SIGNO": "0",
        # A GPU would add the rows of an embedding's gradient in any order, and round otherwise on each rank. In one
        # order Adam's replicas had the same bits after 1,500 steps.
        "TF_USE_DETERMINISTIC_SEGMENT_REDUCTIONS": "true",
        **STALL_DEFAULTS,
    }
    return {name: value for name, value in defaults.items() if name not in environ}
