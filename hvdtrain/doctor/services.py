"""Check Slurm, Docker and Podman, if installed: whether they respond to this user."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from hvdtrain.doctor.checks import (
    Check,
    Options,
    Result,
    fail,
    names_in,
    ok,
    skip,
    took_too_long,
    warn,
)
from hvdtrain.launch.container.container_command import EngineName
from hvdtrain.launch.container.container_engine import (
    CDI_FOLDERS,
    GPU_FIX,
    ContainerEngine,
    Refused,
    ask_engine,
)
from hvdtrain.launch.running.timed_command import CompletedCommand, run

PARTITIONS = "Slurm"
PLUGINS = "srun --mpi"
GPU_RUNTIME = "GPUs in containers"
_PLUGIN = re.compile(r"\b(none|pmi2|pmix(?:_v\d+)?|cray_shasta|openmpi)\b")
# The second is slurmd's copy from slurmctld, on machines without the file itself.
_SLURM_FILES = (
    Path("/etc/slurm/slurm.conf"),
    Path("/run/slurm/conf/slurm.conf"),
    Path("/etc/slurm-llnl/slurm.conf"),
)


def checks(options: Options) -> list[Check]:
    """Return the checks of Slurm and container engines."""
    environ, limit = options.environ, options.quick
    return [
        Check("Slurm", "Slurm", lambda: check_slurm(environ, limit, _SLURM_FILES), limit),
        Check(
            "Containers",
            "containers",
            lambda: check_containers(environ, limit, CDI_FOLDERS),
            limit,
        ),
    ]


# Slurm


def check_slurm(
    environ: Mapping[str, str], limit: float, configurations: Sequence[Path]
) -> Sequence[Result]:
    """Check `sinfo` and `srun --mpi=list`. Returns one skipped result if Slurm is not installed.

    Args:
        environ: Environment of a launch.
        limit: Time limit in seconds.
        configurations: Files of which one exists on every machine of a cluster that does not set SLURM_CONF.
    """
    path = environ.get("PATH")
    if not shutil.which("sinfo", path=path) and not shutil.which("srun", path=path):
        return [skip(PARTITIONS, "not installed here (no sinfo, no srun in PATH)")]
    if "SLURM_CONF" not in environ and not any(
        file.name in names_in(file.parent) for file in configurations
    ):
        return [skip(PARTITIONS, "installed, but no cluster is configured here")]
    sinfo = run(["sinfo", "--noheader", "--format=%P|%D|%t"], limit=limit / 2, environ=environ)
    srun = run(["srun", "--mpi=list"], limit=limit / 2, environ=environ)
    return [check_partitions(sinfo, environ, limit / 2), check_plugins(srun, limit / 2)]


def check_partitions(
    sinfo: CompletedCommand | None, environ: Mapping[str, str], limit: float
) -> Result:
    """Check that Slurm responds, and report which partitions have nodes."""
    if sinfo is None:
        return fail(PARTITIONS, "srun is in PATH but sinfo is not", "install slurm-client")
    if sinfo.returncode is None:
        return took_too_long(PARTITIONS, limit, "is slurmctld reachable? check with scontrol ping")
    if sinfo.returncode != 0:
        return fail(PARTITIONS, sinfo.last_line, _slurm_fix(sinfo.text))
    nodes: dict[str, int] = {}
    down: dict[str, int] = {}
    for row in re.findall(r"^(.+)\|(\d+)\|(\S+)$", sinfo.stdout, re.MULTILINE):
        name, number, state = row[0].rstrip("*"), int(row[1]), row[2]
        # A star means that the node does not respond.
        is_down = state.startswith(("down", "drain", "fail")) or state.endswith("*")
        nodes[name] = nodes.get(name, 0) + number
        down[name] = down.get(name, 0) + (number if is_down else 0)
    if not nodes:
        return fail(PARTITIONS, "no partition is open to you", "ask the cluster's administrator")
    seen = ", ".join(
        f"{name}: {number} nodes" + (f" ({down[name]} down)" if down[name] else "")
        for name, number in nodes.items()
    )
    if nodes == down:
        fix = "see the reasons: sinfo -R; then scontrol update NodeName=... State=RESUME"
        return fail(PARTITIONS, seen, fix)
    job = environ.get("SLURM_JOB_ID")
    return ok(PARTITIONS, f"{seen}; in job {job}" if job else seen)


def check_plugins(srun: CompletedCommand | None, limit: float) -> Result:
    """Report srun's MPI plugins. With PMIx, srun can start MPI ranks; without it, use Gloo, or ssh."""
    if srun is None:
        return fail(PLUGINS, "sinfo is in PATH but srun is not", "install slurm-client")
    if srun.returncode is None:
        return took_too_long(
            PLUGINS, limit, "is slurm.conf readable, and does the host name in it resolve?"
        )
    if srun.returncode != 0:
        return fail(PLUGINS, srun.last_line, _slurm_fix(srun.text))
    plugins = sorted(set(_PLUGIN.findall(srun.text)))
    how = "over MPI and Gloo" if any(p.startswith("pmix") for p in plugins) else "over Gloo"
    return ok(PLUGINS, f"{', '.join(plugins) or 'none'}: srun starts ranks {how}")


def _slurm_fix(text: str) -> str:
    lower = text.lower()
    if "munge" in lower or "credential" in lower or "authentication" in lower:
        return "start munged here, with the cluster's /etc/munge/munge.key and clock"
    if "contact slurm controller" in lower or "connect failure" in lower:
        return "start slurmctld, or name its host in slurm.conf; check with scontrol ping"
    return "check slurm.conf (SLURM_CONF names another one); check with scontrol ping"


# Containers


def check_containers(
    environ: Mapping[str, str], limit: float, cdi_folders: Sequence[Path]
) -> Sequence[Result]:
    """Check docker and podman if installed, and whether those that work can use GPUs.

    Problems are not failures: only `hvdtrain docker` needs these, and clients without their engine are common.
    """
    path = environ.get("PATH")
    installed = [name for name in get_args(EngineName) if shutil.which(name, path=path)]
    if not installed:
        return [skip("containers", "neither docker nor podman is installed here")]
    results, working = [], []
    for name in installed:
        try:
            engine = ask_engine(
                name, environ, limit=limit / len(installed), cdi_folders=cdi_folders
            )
        except Refused as error:
            results.append(skip(name, str(error), _engine_fix(name, str(error))))
        else:
            results.append(ok(name, f"works, version {engine.version}"))
            working.append(engine)
    if not shutil.which("nvidia-smi", path=path):
        return [*results, skip(GPU_RUNTIME, "no NVIDIA GPU here")]
    return [*results, *map(_check_gpus, working)]


def _engine_fix(name: str, said: str) -> str:
    if "no answer" in said:
        return f"restart it: systemctl restart {name}"
    if name == "podman":
        return "podman info --log-level=debug shows why; rootless: add yourself to /etc/subuid; podman system migrate"
    if "permission denied" in said.lower():
        return "sudo usermod -aG docker $USER, and log in again (or use podman)"
    return "start its daemon: sudo systemctl start docker (or use podman)"


def _check_gpus(engine: ContainerEngine) -> Result:
    if engine.has_gpus:
        return ok(GPU_RUNTIME, f"{engine.name} can give them to a container")
    seen = f"{engine.name}: no NVIDIA container toolkit"
    return warn(GPU_RUNTIME, seen, GPU_FIX[engine.name])
