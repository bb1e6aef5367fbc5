"""Submit a job to Slurm's queue, and follow it to its end."""

from __future__ import annotations

import contextlib
import datetime
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hvdtrain.environment import EXIT_FAILURE, EXIT_SIGNAL_BASE
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.running.timed_command import NOT_FOUND, ask

SCRIPTS = Path(".hvdtrain/jobs")
"""Folder of batch scripts and the jobs' output, in the working folder."""
POLL_SECONDS = 2.0
SILENCE_SECONDS = 120.0
"""Time for which Slurm may fail to respond (it may be restarting) before following a job is given up."""

ENDED = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    ]
)

# sbatch's words for a controller that is down or elsewhere; a machine that is not of the cluster has no configuration.
_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|could not establish a configuration source",
    re.IGNORECASE,
)


class SlurmUnreachable(HvdtrainError):
    """Slurm's controller could not be asked; nothing was submitted."""


@dataclass(frozen=True)
class JobState:
    """The state of a Slurm job, or of one task of an array.

    Attributes:
        name: ID of the job; `12_3` for a task of an array, `12_[4-9]` for its pending tasks.
        state: State, such as PENDING, RUNNING or COMPLETED.
        reason: Why the job is pending.
        exit_code: Exit code as a shell reports it; 0 until the job has ended.
        restarts: Number of times the job was requeued.
        output: File for the job's output.
        command: Batch script of the job.
        folder: Working folder of the job.
        started: Start time in seconds since the epoch; None before the start.
        number: Value of SLURM_JOB_ID in the job; each task of an array has its own.
    """

    name: str
    state: str
    reason: str
    exit_code: int
    restarts: int
    output: Path
    command: str = ""
    folder: Path = Path()
    started: float | None = None
    number: str = ""

    @property
    def result(self) -> int:
        """Exit code for the user: never 0 if the job did not complete."""
        return 0 if self.state == "COMPLETED" else self.exit_code or EXIT_FAILURE


def sbatch_argv(script: Path) -> list[str]:
    """Return the command that submits a script and prints the job's ID."""
    return ["sbatch", "--parsable", str(script)]


def submit_job(script: Path) -> str:
    """Submit a batch script and return the job's ID.

    Raises:
        UsageError: sbatch is not installed.
        SlurmUnreachable: Slurm's controller could not be reached.
        HvdtrainError: Slurm rejected the job, or did not respond in time.
    """
    said = ask(sbatch_argv(script), limit=SILENCE_SECONDS)
    if said.returncode == NOT_FOUND:
        raise UsageError(
            "sbatch was not found: submit the job from a login node of a Slurm cluster"
        )
    if said.returncode is None:
        raise HvdtrainError(
            f"Slurm did not answer sbatch within {SILENCE_SECONDS:g} s: check with squeue whether "
            "the job was submitted"
        )
    if said.returncode != 0 and _UNREACHABLE.search(said.stderr):
        raise SlurmUnreachable(
            "nothing was submitted: Slurm's controller could not be reached. Is slurmctld running, and is this a "
            f"login node of the cluster? sbatch says:\n{said.stderr.strip()}"
        )
    if said.returncode != 0:
        raise HvdtrainError(f"sbatch refused the job ({script}):\n{said.stderr.strip()}")
    # Either `7` or `7;cluster`.
    return said.stdout.strip().partition(";")[0]


def read_states(text: str) -> list[JobState]:
    """Parse the output of `scontrol --oneliner show job`, with one job per line."""
    states = []
    for line in text.splitlines():
        # Values may contain spaces, but none contains a word that looks like one of the fields read here.
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "JobId" not in fields:
            continue
        code, _, number = fields.get("ExitCode", "0:0").partition(":")
        name = fields["JobId"]
        if "ArrayTaskId" in fields:
            name = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}"
        states.append(
            JobState(
                name=name,
                state=fields.get("JobState", "UNKNOWN"),
                reason=fields.get("Reason", "None"),
                exit_code=EXIT_SIGNAL_BASE + int(number) if int(number or 0) else int(code),
                restarts=int(fields.get("Restarts", "0")),
                output=Path(_value(line, "StdOut")),
                command=_value(line, "Command"),
                folder=Path(_value(line, "WorkDir")),
                started=start_time(fields.get("StartTime", "")),
                number=fields["JobId"],
            )
        )
    return states


def start_time(text: str) -> float | None:
    """Convert a time such as 2026-01-31T12:00:00 (local), or with an offset, to seconds since the epoch.

    None if it is unknown, or in the future.
    """
    with contextlib.suppress(ValueError):
        when = datetime.datetime.fromisoformat(text).timestamp()
        return when if when <= time.time() else None
    return None


def follow_job(job_id: str, output: BinaryIO, say: Callable[[str], None]) -> int:
    """Wait until a job, or every task of an array, has ended, and return its exit code.

    The output of a job without an array is copied to `output` as it comes, and each change of state is told to `say`.

    Raises:
        HvdtrainError: Slurm no longer responds.
    """
    said: dict[str, tuple[str, int]] = {}
    shown = 0
    ended_before: list[JobState] = []
    while True:
        states = _ask(job_id)
        news = [one for one in states if said.get(one.name) != (one.state, one.restarts)]
        said |= {one.name: (one.state, one.restarts) for one in news}
        for one in news:
            if one.state not in ENDED:
                say(_describe(one))
        if len(states) == 1 and "_" not in states[0].name:
            shown = _copy_new(states[0].output, shown, output)
        for one in news:
            if one.state in ENDED:  # After its last output.
                say(_describe(one))
        # A job that is being requeued briefly appears to have ended, so the end must be seen twice.
        if all(one.state in ENDED for one in states):
            if states == ended_before:
                return max(one.result for one in states)
            ended_before = states
        time.sleep(POLL_SECONDS)


def _describe(job: JobState) -> str:
    text = f"job {job.name}: {job.state.lower()}"
    if job.state == "PENDING" and job.reason != "None":
        text += f" ({job.reason})"
    if job.state in ENDED and job.result:
        text += f", exit code {job.result}"
    if job.restarts:
        text += f", restart {job.restarts}"
    return text


def _ask(job_id: str) -> list[JobState]:
    deadline = time.monotonic() + SILENCE_SECONDS
    while True:
        said = ask(["scontrol", "--oneliner", "show", "job", job_id])
        states = read_states(said.stdout)
        if states:
            return states
        if time.monotonic() > deadline:
            raise HvdtrainError(
                f"Slurm no longer reports on job {job_id}, which may still be running: {said.last_line}"
            )
        time.sleep(POLL_SECONDS)


def _copy_new(path: Path, shown: int, output: BinaryIO) -> int:
    """Copy the file's content beyond `shown` bytes; return its new length."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if path.stat().st_size < shown:
            shown = 0  # Rewritten by a restart.
        file.seek(shown)
        while data := file.read(65536):
            output.write(data)
            shown += len(data)
        output.flush()
    return shown


def _value(line: str, name: str) -> str:
    """Return the value of a field that may contain spaces: up to the next word with a '='."""
    _, _, rest = line.partition(f" {name}=")
    words: list[str] = []
    for word in rest.split(" "):
        if words and "=" in word:
            break
        words.append(word)
    return " ".join(words).rstrip()
