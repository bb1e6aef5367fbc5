"""Scripts that use mpi4py beside Horovod, and import it before TensorFlow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ENVIRONMENT, program

SCRIPT = """
from mpi4py import MPI

import hvdtrain

hvdtrain.init()

import horovod.tensorflow as hvd
import tensorflow as tf

total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank() + 1)
print("total", total, float(hvd.allreduce(tf.constant(total + hvd.rank()), op=hvd.Sum)))
"""
WARNING = "mpi4py was imported before TensorFlow"


@pytest.mark.parametrize("by", ["hvdtrain", "horovodrun"])
def test_mpi4py_before_tensorflow(by: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    start = [*(sys.executable, "-m", "hvdtrain.cli", "run", "--controller", "mpi", "-np", "2")]
    if by == "horovodrun":
        start = [program("horovodrun"), "--mpi", "-np", "2", sys.executable]
    job = subprocess.run(
        [*start, str(script)],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = job.stdout + job.stderr
    assert "total 3 7.0" in output.replace("[1,0]<stdout>:", ""), output
    if by == "hvdtrain":
        assert job.returncode == 0, output
        assert WARNING not in output
    else:  # Open MPI may crash at the end, which cannot be prevented from within, only announced.
        assert WARNING in output
