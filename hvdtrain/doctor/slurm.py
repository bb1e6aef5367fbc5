"""Is there a Slurm, does it answer, and how can it start ranks?"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.doctor.examination import took_too_long
from hvdtrain.doctor.finding import Finding, fail, ok, skip
from hvdtrain.launch.running.bounded import Ran, run

PARTITIONS = "Slurm"
PLUGINS = "srun --mpi"
_PLUGIN = re.compile(r"\b(none|pmi2|pmix(?:_v\d+)?|cray_shasta|openmpi)\b")


def look_at_slurm(
    environ: Mapping[str, str], limit: float, configurations: Sequence[Path]
) -> Sequence[Finding]:
    """What sinfo and `srun --mpi=list` say; one skipped line where there is no Slurm.

    Args:
        configurations: files of which one is there on every machine of a cluster that does not set SLURM_CONF.
    """
    path = environ.get("PATH")
    if not shutil.which("sinfo", path=path) and not shutil.which("srun", path=path):
        return [skip(PARTITIONS, "not installed here (no sinfo, no srun in PATH)")]
    if "SLURM_CONF" not in environ and not any(file.exists() for file in configurations):
        return [skip(PARTITIONS, "its programs are installed, but no cluster is configured here")]
    sinfo = run(["sinfo", "--noheader", "--format=%P|%D|%t"], limit=limit / 2, environ=environ)
    srun = run(["srun", "--mpi=list"], limit=limit / 2, environ=environ)
    return [partitions_finding(sinfo, environ, limit / 2), plugins_finding(srun, limit / 2)]


def partitions_finding(sinfo: Ran | None, environ: Mapping[str, str], limit: float) -> Finding:
    if sinfo is None:
        return fail(PARTITIONS, "srun is in PATH, sinfo is not", "install slurm-client")
    if sinfo.returncode is None:
        fix = "is slurmctld reachable? Ask: scontrol ping"
        return took_too_long(PARTITIONS, limit, fix)
    if sinfo.returncode != 0:
        return fail(PARTITIONS, sinfo.last_line, _fix_of(sinfo.text))
    rows = [line.split("|") for line in sinfo.stdout.splitlines() if line.count("|") == 2]
    nodes = {name.rstrip("*"): 0 for name, _, _ in rows}
    down = dict(nodes)
    for name, number, state in rows:
        nodes[name.rstrip("*")] += int(number)
        # A star: the node does not answer.
        if state.startswith(("down", "drain", "fail")) or state.endswith("*"):
            down[name.rstrip("*")] += int(number)
    if not nodes:
        return fail(PARTITIONS, "no partition is open to you", "ask the cluster's administrator")
    seen = ", ".join(
        f"{name}: {number} nodes" + (f" ({down[name]} down)" if down[name] else "")
        for name, number in nodes.items()
    )
    if all(nodes[name] == down[name] for name in nodes):
        return fail(
            PARTITIONS,
            seen,
            "see the reasons: sinfo -R; then scontrol update NodeName=... State=RESUME",
        )
    job = environ.get("SLURM_JOB_ID")
    return ok(PARTITIONS, f"{seen}; in job {job}" if job else seen)


def plugins_finding(srun: Ran | None, limit: float) -> Finding:
    """PMIx starts MPI ranks by srun itself; without it srun starts them over Gloo, or ssh is needed."""
    if srun is None:
        return fail(PLUGINS, "sinfo is in PATH, srun is not", "install slurm-client")
    if srun.returncode is None:
        return took_too_long(PLUGINS, limit, "is slurm.conf readable, and its host name resolved?")
    if srun.returncode != 0:
        return fail(PLUGINS, srun.last_line, _fix_of(srun.text))
    plugins = sorted(set(_PLUGIN.findall(srun.text)))
    how = "over MPI and Gloo" if any(p.startswith("pmix") for p in plugins) else "over Gloo"
    return ok(PLUGINS, f"{', '.join(plugins) or 'none'}: srun starts ranks {how}")


def _fix_of(text: str) -> str:
    lower = text.lower()
    if "munge" in lower or "credential" in lower or "authentication" in lower:
        return "start munged here, with the cluster's /etc/munge/munge.key and clock"
    if "contact slurm controller" in lower or "connect failure" in lower:
        return "start slurmctld, or name its host in slurm.conf; ask: scontrol ping"
    return "check slurm.conf (SLURM_CONF names another one); ask: scontrol ping"
