"""Find the running jobs: launches on this machine, Slurm jobs and containers that hvdtrain started.

There is no registry: the jobs are found in /proc, in Slurm's queue and through the container engine."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.environment import LAUNCH_ID, LOG_DIR
from hvdtrain.errors import UsageError
from hvdtrain.launch.container.container_command import LABEL
from hvdtrain.launch.running.log_folder import LOGS
from hvdtrain.launch.running.run_status import RunStatus, read_status
from hvdtrain.launch.running.timed_command import ask
from hvdtrain.launch.slurm.job_queue import ENDED, SCRIPTS, JobState, read_states, start_time
from hvdtrain.worker.proc_files import all_processes, environment_of, folder_of

SHORT = 8
CLOCK_SECONDS = 2.0
"""Maximum difference between file times and the clock."""


@dataclass(frozen=True)
class Job:
    """A launch, a Slurm job or a container.

    Attributes:
        name: Name for `hvdtrain logs` and `hvdtrain stop`.
        kind: "run", "slurm" or "container".
        state: State, such as running or pending.
        command: Command that runs.
        seconds: Time since the start; None if it has not started.
        stop: Command that ends the job.
        status: Last known status; None if unknown.
        log_dir: Folder with the ranks' output; None if unknown.
        show: Command that prints the job's output, for when no log folder is known.
    """

    name: str
    kind: str
    state: str
    command: str
    seconds: float | None
    stop: tuple[str, ...]
    status: RunStatus | None = None
    log_dir: Path | None = None
    show: tuple[str, ...] = ()


def find_jobs() -> list[Job]:
    """Return all running jobs of this user, oldest first."""
    found = [*_runs_here(), *_slurm_jobs(), *_containers()]
    return sorted(found, key=lambda job: -(job.seconds or 0.0))


def the_job(name: str, jobs: Sequence[Job]) -> Job:
    """Return the job with this name or prefix. Raises UsageError if there is none, or more than one."""
    found = [job for job in jobs if job.name == name] or [
        job for job in jobs if name and job.name.startswith(name)
    ]
    if len(found) == 1:
        return found[0]
    have = ", ".join(job.name for job in found or jobs) or "none"
    problem = "several jobs match; type more of the name" if found else "no such job"
    raise UsageError(f"{name}: {problem}; running: {have}")


def _runs_here() -> Iterable[Job]:
    seen: dict[str, Path] = {}
    own = _pid_namespace(os.getpid())
    for pid in all_processes():
        # Other users' processes cannot be read, and processes end during the scan.
        with suppress(OSError):
            environ = environment_of(pid)
            # Processes in a container are found through its engine.
            if LAUNCH_ID in environ and LOG_DIR in environ and _pid_namespace(pid) == own:
                seen[environ[LAUNCH_ID]] = Path(environ[LOG_DIR])
    for launch_id, folder in seen.items():
        status = read_status(folder)
        # A run from another host may have only ranks here, and its process ID may have been reused.
        if status is not None and status.run == launch_id and _is_launcher(status):
            yield Job(
                name=status.run[:SHORT],
                kind="run",
                state="running",
                command=status.command,
                seconds=time.time() - status.started,
                stop=("kill", "-TERM", str(status.pid)),
                status=status,
                log_dir=folder,
            )


def _is_launcher(status: RunStatus) -> bool:
    """Return whether the launcher named by the status runs on this host, and has since the run began."""
    if status.host != platform.node() or status.pid <= 0:
        return False
    import psutil

    try:
        # Not the time of its folder in /proc, which the kernel sets when the folder is first looked up.
        born = psutil.Process(status.pid).create_time()
    except psutil.Error:
        return False
    return born <= status.started + CLOCK_SECONDS


def _pid_namespace(pid: int) -> str:
    return os.readlink(folder_of(pid) / "ns/pid")  # noqa: PTH115


def _slurm_jobs() -> Iterable[Job]:
    if os.environ.get("SLURM_JOB_ID"):
        return  # Inside a Slurm job, its run is found in /proc.
    text = ask(["scontrol", "--oneliner", "show", "job"]).answer
    own = re.compile(rf"\bUserId=[^ ]*\({os.getuid()}\)")
    for line in text.splitlines():
        states = read_states(line)
        if states and own.search(line) and f"/{SCRIPTS}/" in line and states[0].state not in ENDED:
            yield _slurm_job(states[0])


def _slurm_job(state: JobState) -> Job:
    own = (one for one in _statuses(state.folder) if one[0].slurm_job == state.number)
    status, folder = next(own, (None, None))
    begun = state.started - CLOCK_SECONDS if state.started and state.restarts else 0.0
    if status is not None and status.started < begun:
        status = folder = None  # Of the run before the job was requeued, with the same ID.
    return Job(
        name=state.name,
        kind="slurm",
        state=state.state.lower(),
        command=status.command if status else state.command,
        seconds=time.time() - state.started if state.started else None,
        stop=("scancel", state.name),
        status=None if state.state == "PENDING" else status,  # A requeued job's is the last run's.
        log_dir=folder,
        show=("cat", str(state.output)),
    )


def _statuses(folder: Path) -> Iterator[tuple[RunStatus, Path]]:
    """Yield the status and log folder of each run started in `folder`, newest first; nothing if it cannot be read."""
    with suppress(OSError):
        for log_dir in sorted((folder / LOGS).iterdir(), reverse=True):
            status = read_status(log_dir)
            if status is not None:
                yield status, log_dir


def _containers() -> Iterable[Job]:
    seen = set()
    for engine in ("docker", "podman"):
        ours = [engine, "ps", "--filter", f"label={LABEL}", "--format", "{{.ID}}"]
        for line in ask(ours).answer.splitlines():
            if line.strip() in seen:
                continue  # docker may be an alias of podman.
            seen.add(line.strip())
            about = json.loads(ask([engine, "inspect", line.strip()]).answer or "[{}]")[0]
            config = about.get("Config", {})
            started = start_time(about.get("State", {}).get("StartedAt", ""))
            status, folder = _run_in_container(config, started)
            yield Job(
                name=line.strip(),
                kind="container",
                state="running",
                command=" ".join(config.get("Cmd") or []),
                seconds=time.time() - started if started else None,
                stop=(engine, "stop", "--time=40", line.strip()),
                status=status,
                log_dir=folder,
                show=(engine, "logs", line.strip()),
            )


def _run_in_container(
    config: Mapping[str, Any], started: float | None
) -> tuple[RunStatus | None, Path | None]:
    """Return the status and log folder of a container's run: its working folder is also on this machine."""
    own = [
        (status, folder)
        for status, folder in _statuses(Path(config.get("WorkingDir") or os.devnull))
        if status.host == config.get("Hostname") and started and status.started >= started
    ]
    # With --network=host, later containers may have the same host name.
    return own[-1] if own else (None, None)
