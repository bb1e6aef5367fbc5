"""Does Horovod's library load, beside this TensorFlow, in this environment?"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.doctor.engine_report import MARKER
from hvdtrain.doctor.examination import took_too_long
from hvdtrain.doctor.finding import Finding, fail, ok
from hvdtrain.launch.running.bounded import Ran, run

NAME = "Horovod loads"
_REBUILD = "hvdtrain install-horovod --force"
# What the loader says -> the fix; the first that fits.
_FIXES = (
    ("No module named 'tensorflow'", "pip install 'hvdtrain[cpu]' (or 'hvdtrain[gpu]')"),
    ("No module named 'horovod'", "hvdtrain install-horovod"),
    ("libmpi", f"load the MPI that it was built with (module load openmpi), or: {_REBUILD}"),
    ("libcud", f"load CUDA 12 (module load cuda), or build without: {_REBUILD}"),
    ("libnccl", f"pip install nvidia-nccl-cu12, then: {_REBUILD} --gpu"),
)


@dataclass(frozen=True)
class EngineReport:
    """What a loaded Horovod and its TensorFlow can do.

    Attributes:
        mpi, gloo, nccl: what Horovod was built with.
        tensorflow_cuda: whether TensorFlow was built for GPUs.
        gpus: number of GPUs that TensorFlow sees.
    """

    mpi: bool
    gloo: bool
    nccl: bool
    tensorflow_cuda: bool
    gpus: int


def load_engine(environ: Mapping[str, str], limit: float) -> tuple[EngineReport | None, Finding]:
    """Load TensorFlow and Horovod in a process of its own."""
    argv = [sys.executable, "-m", "hvdtrain.doctor.engine_report"]
    return read_report(run(argv, limit=limit, environ=environ), limit)


def read_report(said: Ran | None, limit: float) -> tuple[EngineReport | None, Finding]:
    assert said is not None, "this Python is there"
    if said.returncode is None:
        return None, took_too_long(NAME, limit)
    lines = [line for line in said.stdout.splitlines() if line.startswith(MARKER)]
    if said.returncode != 0 or not lines:
        how = said.last_line or f"ended with exit code {said.returncode}"
        fix = next((fix for sign, fix in _FIXES if sign in said.stderr), _REBUILD)
        return None, fail(NAME, how, fix)
    report = EngineReport(**json.loads(lines[-1].removeprefix(MARKER)))
    parts = [name for name in ("mpi", "gloo", "nccl") if getattr(report, name)]
    return report, ok(NAME, f"with {', '.join(parts)} ({said.seconds:.1f} s with TensorFlow)")
