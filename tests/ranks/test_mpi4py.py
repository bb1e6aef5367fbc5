"""Scripts that use mpi4py beside Horovod, and import it before TensorFlow."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch import launch, run_command

SCRIPT = """
from mpi4py import MPI

import hvdtrain

hvdtrain.init()

import horovod.tensorflow as hvd
import tensorflow as tf

total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank() + 1)
both = float(hvd.allreduce(tf.constant(total + hvd.rank()), op=hvd.Sum))
if hvd.rank() == 0:
    print(f"total {total} {both}", flush=True)
"""
WARNING = "mpi4py was imported before TensorFlow"


@pytest.mark.parametrize("by", ["hvdtrain", "mpirun"])
def test_mpi4py_before_tensorflow(by: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    if by == "hvdtrain":
        options = ["--controller", "mpi", "-np", "2", "--log-dir", str(tmp_path / "logs")]
        job = run_command([sys.executable, "-m", "hvdtrain.cli", "run", *options, str(script)])
        assert job.returncode == 0, job.output
        assert WARNING not in job.output
    else:  # Open MPI may crash at the end, which cannot be prevented from within, only announced.
        job = launch([sys.executable, str(script)])
        assert WARNING in job.output
    assert "total 3 7.0" in job.output, job.output
