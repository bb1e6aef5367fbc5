"""Test the newly installed Horovod with an allreduce of two ranks.

`command` and `environment` compose the launch; each rank runs this file as a module or script. Its argument is the
expected number of ranks (default: 2).
"""

import os
import sys
import sysconfig
from collections.abc import Mapping

from hvdtrain.environment import STALL_DEFAULTS
from hvdtrain.launch.launchers.horovodrun import STAND_IN

RANKS = 2
TIMEOUT_SECONDS = 180.0
"""Time limit of the test, mostly for importing TensorFlow twice from a slow disk."""

PASSED = "hvdtrain selftest passed"


def command(controller: str) -> list[str]:
    """Return the command for two ranks over `controller` ("gloo" or "mpi").

    It is Horovod's launcher as `hvdtrain run` starts it: horovodrun would import TensorFlow once more by itself.
    """
    return [
        *STAND_IN,
        f"--{controller}",
        "-np",
        str(RANKS),
        "-H",
        f"localhost:{RANKS}",
        *(sys.executable, "-P", "-m", "hvdtrain.install.selftest"),
    ]


def load_command() -> list[str]:
    """Return a command that only loads Horovod's library, in one process."""
    return [sys.executable, "-P", "-c", "import horovod.tensorflow"]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` without settings that would affect the test, and with this Python's scripts first in PATH."""
    kept = {name: value for name, value in base.items() if not name.startswith("HOROVOD_")}
    path = os.pathsep.join((sysconfig.get_path("scripts"), base.get("PATH", os.defpath)))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    return {**kept, **STALL_DEFAULTS, **quiet, "PATH": path}


def main() -> None:
    """Run one rank: check an allreduce of 1000 numbers. Exits with a message if the sum is wrong."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else RANKS
    hvd.init()
    total = hvd.allreduce(
        tf.range(1000.0) + float(hvd.rank()), op=hvd.Sum, name="hvdtrain.selftest"
    )
    expected = ranks * tf.range(1000.0) + float(sum(range(ranks)))
    if hvd.size() != ranks or not bool(tf.reduce_all(total == expected)):
        raise SystemExit(f"rank {hvd.rank()} of {hvd.size()}: the sum over {ranks} ranks is wrong")
    if hvd.rank() == 0:
        print(PASSED, flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
