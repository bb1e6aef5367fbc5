"""The GPUs and TPUs of this machine, as far as they can be known without TensorFlow."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SECONDS = 20
"""nvidia-smi takes seconds where the driver is not kept loaded."""
_TPU_NAME = "TPU_NAME"
_GPU_FILES = "dev/nvidia[0-9]*"
# The device files of a TPU's chips: accelerators of the host's, or VFIO groups.
_TPU_FILES = ("dev/accel*", "dev/vfio/[0-9]*")


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """The NVIDIA GPUs that a program may use here, as CUDA_VISIBLE_DEVICES names them.

    As in CUDA, its list ends at the first entry that names none.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and not _entries(chosen):
        return ()
    count = _count_gpus(environ, root)
    if chosen is None:
        return tuple(map(str, range(count)))
    return _entries(chosen)[:count]


def tpu_here(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """How a TPU can be reached from here: `TPU_NAME=...`, or its device files; empty if not at all."""
    if environ.get(_TPU_NAME):
        return f"{_TPU_NAME}={environ[_TPU_NAME]}"
    for pattern in _TPU_FILES:
        files = sorted(root.glob(pattern))
        if files:
            return f"/{files[0].relative_to(root)}"
    return ""


def _entries(chosen: str) -> tuple[str, ...]:
    """`0,GPU-1a2b,-1,3` -> 0 and GPU-1a2b."""
    found = []
    for entry in chosen.split(","):
        word = entry.strip()
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", word, re.ASCII):
            break
        found.append(word)
    return tuple(found)


def _count_gpus(environ: Mapping[str, str], root: Path) -> int:
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return len(list(root.glob(_GPU_FILES)))
    try:
        said = subprocess.run(
            [program, "--list-gpus"], capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if said.returncode != 0:
        return 0
    return sum(line.startswith("GPU ") for line in said.stdout.splitlines())
