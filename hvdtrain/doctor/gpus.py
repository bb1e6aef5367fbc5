"""The GPUs that TensorFlow and NCCL see, against those that nvidia-smi lists."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.doctor.examination import took_too_long
from hvdtrain.doctor.finding import Finding, fail, ok, skip, warn
from hvdtrain.doctor.horovod import EngineReport
from hvdtrain.doctor.nccl_report import MARKER
from hvdtrain.launch.running.bounded import Ran, run

DRIVER, TENSORFLOW, NCCL = "NVIDIA driver", "TensorFlow's GPUs", "NCCL's GPUs"
_QUESTION = ["--query-gpu=index,uuid,name,driver_version", "--format=csv,noheader"]
_GPU_WHEEL = "pip uninstall tensorflow-cpu && pip install 'hvdtrain[gpu]'"
_GPU_BUILD = "hvdtrain install-horovod --gpu"


@dataclass(frozen=True)
class Gpu:
    """A line of nvidia-smi's."""

    index: str
    uuid: str
    name: str
    driver: str


def list_gpus(environ: Mapping[str, str], limit: float) -> list[Gpu] | Finding:
    """What nvidia-smi lists; a finding if there is none, or if it does not work."""
    if not shutil.which("nvidia-smi", path=environ.get("PATH")):
        return skip(DRIVER, "no NVIDIA GPU here (no nvidia-smi in PATH)")
    said = run(["nvidia-smi", *_QUESTION], limit=limit, environ=environ)
    if said is None or said.returncode is None:
        fix = "a GPU may have failed: dmesg | grep -i xid; a reboot resets it"
        return took_too_long(DRIVER, limit, fix)
    if said.returncode != 0:
        fix = "reboot after an update of the driver; else install the driver again"
        return fail(DRIVER, said.last_line, fix)
    rows = [[word.strip() for word in line.split(",")] for line in said.stdout.splitlines()]
    gpus = [Gpu(*row) for row in rows if len(row) == 4]
    return gpus or fail(DRIVER, "nvidia-smi lists no GPU", "in a container: docker run --gpus all")


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves; as in CUDA, the list ends at the first entry that names none."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in chosen.split(","):
        word = entry.strip()
        match = [g for g in gpus if word and (word == g.index or g.uuid.startswith(word))]
        if not match:
            break
        found.append(match[0])
    return found


def driver_finding(gpus: Sequence[Gpu], chosen: Sequence[Gpu]) -> Finding:
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    seen = f"{gpus[0].driver}; {len(gpus)} x {names}"
    if len(chosen) == len(gpus):
        return ok(DRIVER, seen)
    if chosen:
        return ok(DRIVER, f"{seen}; CUDA_VISIBLE_DEVICES leaves {len(chosen)}")
    return warn(DRIVER, f"{seen}; CUDA_VISIBLE_DEVICES hides all", "unset CUDA_VISIBLE_DEVICES")


def tensorflow_finding(chosen: Sequence[Gpu], report: EngineReport | None) -> Finding:
    if report is None:
        return skip(TENSORFLOW, "Horovod's library does not load")
    if not report.tensorflow_cuda:
        return warn(TENSORFLOW, "none: this TensorFlow is built for CPUs", _GPU_WHEEL)
    seen = f"{report.gpus} of {len(chosen)}"
    if report.gpus == len(chosen):
        return ok(TENSORFLOW, seen)
    fix = "pip install 'hvdtrain[gpu]' (its CUDA libraries), and unset LD_LIBRARY_PATH if it names another CUDA"
    return fail(TENSORFLOW, seen, fix)


def look_at_nccl(
    chosen: Sequence[Gpu],
    report: EngineReport | None,
    environ: Mapping[str, str],
    limit: float,
) -> Finding:
    """NCCL makes a communicator over all GPUs, which is the first thing that a job does with it."""
    if report is None:
        return skip(NCCL, "Horovod's library does not load")
    if not report.tensorflow_cuda:
        return skip(NCCL, "this TensorFlow is built for CPUs")
    if not report.nccl:
        return fail(NCCL, "Horovod was built without NCCL", _GPU_BUILD)
    argv = [sys.executable, "-m", "hvdtrain.doctor.nccl_report", str(len(chosen))]
    return nccl_finding(run(argv, limit=limit, environ=environ), len(chosen), limit)


def nccl_finding(said: Ran | None, wanted: int, limit: float) -> Finding:
    if said is None or said.returncode is None:
        fix = "NCCL waits for a GPU or a link: NCCL_DEBUG=INFO shows which; try NCCL_P2P_DISABLE=1"
        return took_too_long(NCCL, limit, fix)
    lines = [line for line in said.stdout.splitlines() if line.startswith(MARKER)]
    answer = json.loads(lines[-1].removeprefix(MARKER)) if lines else {"error": said.last_line}
    if "error" in answer:
        fix = "NCCL_DEBUG=INFO shows why; in a container: --ipc=host, or --shm-size=1g"
        if "cannot open" in answer["error"]:
            fix = "pip install nvidia-nccl-cu12, then " + _GPU_BUILD
        return fail(NCCL, answer["error"], fix)
    return ok(NCCL, f"{wanted} of {wanted}, NCCL {answer['version']}")
