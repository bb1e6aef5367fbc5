"""Count the cores, GPUs and TPUs that this process may use, without importing TensorFlow."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path

from hvdtrain.host_limits import cpu_quota
from hvdtrain.launch.running.timed_command import ask
from hvdtrain.strategy_names import TPU_CHIPS

_CPUS = Path("/sys/devices/system/cpu")
_TPU_NAME = "TPU_NAME"
_GPU_FILES = "dev/nvidia[0-9]*"


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may use, named as in CUDA_VISIBLE_DEVICES.

    As in CUDA, the list ends at the first invalid entry.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and not _entries(chosen):
        return ()
    count = _count_gpus(environ, root)
    if chosen is None:
        return tuple(map(str, range(count)))
    there = takewhile(lambda entry: not entry.isdigit() or int(entry) < count, _entries(chosen))
    return tuple(there)[:count]


def tpu_here(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return how a TPU can be reached: `TPU_NAME=...`, or its device file. Empty if there is no TPU."""
    if environ.get(_TPU_NAME):
        return f"{_TPU_NAME}={environ[_TPU_NAME]}"
    for pattern in TPU_CHIPS:
        files = sorted(root.glob(f"dev/{pattern}"))
        if files:
            return f"/{files[0].relative_to(root)}"
    return ""


def _entries(chosen: str) -> tuple[str, ...]:
    """Return the valid entries at the start: for `0,GPU-1a2b,-1,3`, these are 0 and GPU-1a2b."""
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
    said = ask([program, "--list-gpus"], environ=environ)
    return sum(line.startswith("GPU ") for line in said.answer.splitlines())


def usable_cores() -> int:
    """Return the number of physical cores in this process's affinity mask, limited by its cgroup CPU quota."""
    cores = physical_cores(os.sched_getaffinity(0), _CPUS)
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, round(quota)))


def physical_cores(cpus: Iterable[int], root: Path) -> int:
    """Return the number of physical cores of these logical CPUs. A CPU without topology counts as one core."""

    def core_of(cpu: int) -> str:
        try:
            return (root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            return str(cpu)

    return len({core_of(cpu) for cpu in cpus})
