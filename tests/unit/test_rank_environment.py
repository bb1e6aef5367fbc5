"""Each rank's share of the host, and that TensorFlow takes it."""

import os
import subprocess
import sys

import pytest

from hvdtrain.environment import STALL_DEFAULTS
from hvdtrain.worker.rank_environment import rank_environment


def test_cores_are_shared_between_local_ranks() -> None:
    assert rank_environment({"HOROVOD_LOCAL_SIZE": "2"}, 8)["OMP_NUM_THREADS"] == "4"
    assert rank_environment({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 8)["TF_NUM_INTRAOP_THREADS"] == "2"
    assert rank_environment({"HOROVOD_LOCAL_SIZE": "4"}, 2)["TF_NUM_INTRAOP_THREADS"] == "1"
    alone = rank_environment({}, 8)
    assert alone["TF_NUM_INTRAOP_THREADS"] == alone["TF_NUM_INTEROP_THREADS"] == "8"
    crowded = rank_environment({"HOROVOD_LOCAL_SIZE": "8"}, 8)
    assert (crowded["TF_NUM_INTRAOP_THREADS"], crowded["TF_NUM_INTEROP_THREADS"]) == ("1", "1")


def test_the_users_own_settings_stay() -> None:
    chosen = rank_environment({"OMP_NUM_THREADS": "7", "HOROVOD_LOCAL_SIZE": "2"}, 8)
    assert "OMP_NUM_THREADS" not in chosen
    assert chosen.items() >= {**STALL_DEFAULTS, "UCX_DEBUG_SIGNO": "0"}.items()
    assert "UCX_DEBUG_SIGNO" not in rank_environment({"UCX_DEBUG_SIGNO": "12"}, 8)


def test_gpus_add_rows_in_one_order() -> None:
    order = "TF_USE_DETERMINISTIC_SEGMENT_REDUCTIONS"
    assert rank_environment({}, 8)[order] == "true"
    assert order not in rank_environment({order: "false"}, 8)


PROGRAM = """
import pathlib
import tensorflow as tf
for _ in range(20):
    tf.linalg.matmul(tf.ones((600, 600)), tf.ones((600, 600)))
names = [(task / "comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
operations = sum(name.startswith("tf_Compute") for name in names)
print(operations, len(names) - operations)
"""


def threads_of_tensorflow(intra: int, inter: int) -> tuple[int, int]:
    """(threads that run operations, all other threads) of a process with these settings."""
    settings = {"TF_NUM_INTRAOP_THREADS": str(intra), "TF_NUM_INTEROP_THREADS": str(inter)}
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **settings, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return int(printed[0]), int(printed[1])


@pytest.mark.slow
def test_tensorflow_obeys() -> None:
    operations, others = threads_of_tensorflow(intra=1, inter=3)
    more_operations, more_others = threads_of_tensorflow(intra=4, inter=3)
    assert operations == more_operations == 3
    assert more_others - others == 3
