"""Generate the batch script for a JobRequest. Pure: the text depends on the request alone.

Words of the command that look secret (`--password VALUE`) are not in the script, which takes them from the job's
environment (`secret_words`).

A job that is warned before its end (by the time limit or preemption) passes SIGUSR1 on to its ranks,
and may requeue itself:

- Slurm warns only the script (`B:`), which passes the signal to `hvdtrain run`, and that to every
  rank. srun would signal its step as well, but horovodrun has no step.
- Training that ends by itself after the warning, with a nonzero code, stopped because of it: the job
  is requeued. Training that continues is stopped and requeued shortly before the time limit. A
  failure unrelated to the warning recurs after the restart, unwarned, and ends the job.
- SIGTERM means that Slurm is already ending the job: by `scancel`, which must be final, or by a
  preemption, where Slurm itself requeues the job. The script then requeues nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdtrain.environment import SECRET_WORD
from hvdtrain.errors import UsageError
from hvdtrain.launch.secrets import masked

WARNING_SECONDS = 120
MARGIN_SECONDS = 10
"""Time before its end at which a job that is still training is requeued."""

_TIME = re.compile(r"(\d{1,9}-)?\d{1,9}(:\d\d){0,2}|UNLIMITED", re.ASCII)
_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", re.ASCII)
_MEMORY = re.compile(r"\d+[KMGT]?", re.ASCII | re.IGNORECASE)
_GPUS = re.compile(r"([\w.-]+:)*[1-9]\d*", re.ASCII)
_OPTION = re.compile(r"(--[A-Za-z][\w-]*|-[A-Za-z])", re.ASCII)

# Options with a counterpart of hvdtrain's own, under another name.
_SHORT = {
    "-J": "--job-name",
    "-N": "--nodes",
    "-c": "--cpus-per-task",
    "-t": "--time",
    "-p": "--partition",
    "-A": "--account",
    "-q": "--qos",
    "-a": "--array",
    "-o": "--output",
}
_OWN_NAMES = {
    "--ntasks-per-node": "--tasks-per-node",
    "--signal": "--warning",
    "--requeue": "--requeue",
}
# Where a cluster requeues each job whose node has failed (JobRequeue=1), only this option prevents it.
_WITHOUT_REQUEUE = "--no-requeue"
# Options of sbatch whose names are prefixes of others.
_WHOLE_NAMES = {"--gpus", "--ntasks"}


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job for sbatch.

    Attributes:
        command: Command to run on the first node: `hvdtrain run ...`.
        job_name: Name of the job in squeue.
        output: File for the job's output, with Slurm's %-patterns.
        nodes, tasks_per_node, cpus_per_task: Numbers, at least 1. None leaves them to Slurm.
        gpus_per_node: A number, or TYPE:NUMBER.
        time: Time limit in Slurm's format: minutes, H:MM:SS or D-HH:MM:SS.
        partition, account, qos: Queue and accounting. None leaves them to Slurm.
        array: Tasks of a job array, such as 0-3 or 0-99%4; each runs the whole job once.
        memory: Memory per node, such as 64G.
        mail_type, mail_user: Events that Slurm reports by mail, such as END,FAIL, and the recipient.
        directives: Additional #SBATCH lines, such as --constraint=a100.
        warning_seconds: Seconds before the time limit at which every rank gets SIGUSR1. None sends none.
        requeue: Whether to requeue the job if the time limit comes before the end of training.

    Raises:
        UsageError: sbatch would reject or misinterpret an option.
    """

    command: tuple[str, ...]
    job_name: str
    output: str
    nodes: int = 1
    tasks_per_node: int | None = None
    gpus_per_node: str | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    array: str | None = None
    memory: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    directives: tuple[str, ...] = ()
    warning_seconds: int | None = None
    requeue: bool = False

    def __post_init__(self) -> None:
        for name, number in (
            ("--nodes", self.nodes),
            ("--tasks-per-node", self.tasks_per_node),
            ("--cpus-per-task", self.cpus_per_task),
            ("--warning", self.warning_seconds),
        ):
            if number is not None and number < 1:
                raise UsageError(f"{name} {number}: must be at least 1")
        for name, text, form, example in (
            ("--time", self.time, _TIME, "minutes, H:MM:SS or D-HH:MM:SS, such as 1-12:00:00"),
            ("--array", self.array, _ARRAY, "numbers and ranges, such as 0-3, 1,5,9 or 0-99%4"),
            ("--mem", self.memory, _MEMORY, "a number with K, M, G or T, such as 64G"),
            (
                "--gpus-per-node",
                self.gpus_per_node,
                _GPUS,
                "a number or TYPE:NUMBER, such as a100:4",
            ),
        ):
            if text is not None and not form.fullmatch(text):
                raise UsageError(f"{name} {text!r}: expected {example}")
        for line in self.directives:
            _check_directive(line, _options(self), self.requeue)
        if "/" in self.job_name:
            raise UsageError(
                f"--job-name {self.job_name!r}: '/' would be a folder in the name of the job's output file: "
                "leave it out"
            )
        for value in (*_options(self).values(), *self.directives):
            if value is not None and ("\n" in value or "\0" in value):
                raise UsageError(f"{value!r} contains a newline, which would end the #SBATCH line")
        limit = _seconds(self.time)
        if self.warning_seconds is not None and limit is not None and self.warning_seconds >= limit:
            raise UsageError(
                f"--warning {self.warning_seconds} is not shorter than --time {self.time}, which "
                f"is {limit} seconds: lower --warning, or ask for more time"
            )


def _check_directive(line: str, options: Iterable[str], requeue: bool) -> None:
    """Check that a line is an option of sbatch, and not one that hvdtrain sets. Raises UsageError if not."""
    match = _OPTION.match(line)
    if match is None:
        raise UsageError(
            f"--sbatch {line!r}: expected an option of sbatch, such as --sbatch=--constraint=a100"
        )
    own = [*options, *_OWN_NAMES, *([_WITHOUT_REQUEUE] if requeue else [])]
    for word in line.split():
        match = _OPTION.match(word)
        name = _SHORT.get(match[0], match[0]) if match else ""
        # sbatch accepts abbreviated names.
        meant = [one for one in own if one == name] or [one for one in own if one.startswith(name)]
        if name and meant == [_WITHOUT_REQUEUE]:
            raise UsageError(f"--sbatch {line!r}: --requeue says the opposite: use only one")
        if name and meant and name not in _WHOLE_NAMES:
            raise UsageError(
                f"--sbatch {line!r}: hvdtrain submit has its own option for this: use "
                f"{_OWN_NAMES.get(meant[0], meant[0])}"
            )


def batch_script(request: JobRequest) -> str:
    """Return the text of the batch script."""
    lines = [
        "#!/bin/bash",
        *(
            f"#SBATCH {name}={shlex.quote(value)}"
            for name, value in _options(request).items()
            if value is not None
        ),
        *(f"#SBATCH {line}" for line in request.directives),
    ]
    if request.requeue:
        lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
    command = _in_shell(request.command)
    if request.warning_seconds is None:
        return "\n".join([*lines, "", f"exec {command}", ""])
    job = _NAME_OF_TASK if request.array else "$SLURM_JOB_ID"
    in_time = [f"job={job}", _requeue_in_time(request.warning_seconds)]
    parts = [*lines, "", *(in_time if request.requeue else [])]
    parts += [_WARN_AND_REQUEUE if request.requeue else _WARN, f"{command} &", _WAIT]
    parts += [_REQUEUE] if request.requeue else []
    return "\n".join([*parts, 'exit "$code"', ""])


def secret_words(command: Sequence[str]) -> dict[str, str]:
    """Return the words of the command that look secret, by the variable from which the script takes each."""
    secret = [word for word, shown in zip(command, masked(command), strict=True) if word != shown]
    return {f"{SECRET_WORD}{number}": word for number, word in enumerate(dict.fromkeys(secret), 1)}


def _in_shell(command: Sequence[str]) -> str:
    """Format the command for the shell, which exits with a message if the variable of a secret word is not set."""
    names = {word: name for name, word in secret_words(command).items()}
    return " ".join(
        f'"${{{names[word]}:?is not set: submit with hvdtrain submit}}"'
        if word in names
        else shlex.quote(word)
        for word in command
    )


def default_warning(time: str | None) -> int:
    """Return the default seconds between warning and time limit: enough to save a large model."""
    limit = _seconds(time)
    return WARNING_SECONDS if limit is None else max(1, min(WARNING_SECONDS, limit // 2))


def _options(request: JobRequest) -> dict[str, str | None]:
    """Return the options of sbatch with their values; None if not requested."""
    numbers = {
        "--nodes": request.nodes,
        "--ntasks-per-node": request.tasks_per_node or _workers_per_node(request),
        "--cpus-per-task": request.cpus_per_task,
    }
    warning = request.warning_seconds
    return {
        "--job-name": request.job_name,
        **{name: None if number is None else str(number) for name, number in numbers.items()},
        "--gpus-per-node": request.gpus_per_node,
        "--mem": request.memory,
        "--time": request.time,
        "--partition": request.partition,
        "--account": request.account,
        "--qos": request.qos,
        "--array": request.array,
        "--output": request.output,
        "--mail-type": request.mail_type,
        "--mail-user": request.mail_user,
        "--signal": None if warning is None else f"B:USR1@{warning}",
    }


def _workers_per_node(request: JobRequest) -> int | None:
    """Return the number of GPUs per node, as Slurm counts cores by tasks; None if there are none, or the user says."""
    if request.gpus_per_node is None or any("--ntasks" in line for line in request.directives):
        return None
    return int(request.gpus_per_node.rpartition(":")[2])


def _seconds(time: str | None) -> int | None:
    """Convert a time limit to seconds. None if there is none (0 in Slurm), or it is invalid."""
    if time is None or time == "UNLIMITED" or not _TIME.fullmatch(time):
        return None
    days, dash, rest = time.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    # After days, hours come first; one number alone is minutes, two are minutes and seconds.
    first = 3600 if dash or len(numbers) == 3 else 60
    units = (first, first // 60, 1) if first == 3600 else (60, 1)
    seconds = sum(n * unit for n, unit in zip(numbers, units, strict=False))
    return int(days or 0) * 86400 + seconds or None


# SLURM_JOB_ID of an array's last task is the ID of the whole array, so name the task itself.
_NAME_OF_TASK = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"

_WARN = """\
run=

# Pass on Slurm's warning (the time limit is near, or the job is being preempted) to every rank. It may arrive before
# $run holds the process ID.
warn() {
    run=${run:-$!}
    kill -USR1 "$run"
}
trap warn USR1
"""


def _requeue_in_time(warning: int) -> str:
    """Return the part of the script that requeues the job shortly before its end."""
    return f"""\
run=
warned=
ending=
timer=

# Requeue the job if training has not ended shortly before the time limit.
requeue_in_time() {{
    left={warning - MARGIN_SECONDS}
    end=$(squeue --noheader --jobs="$job" --format=%e)
    # If Slurm does not report the end time, it is as near as the warning says.
    case $end in
    ????-??-??T*) last=$(date --date="$end" +%s) && left=$((last - {MARGIN_SECONDS} - $(date +%s))) ;;
    esac
    # Wait without a child process, which could outlive this one and keep the job's output open.
    [ "$left" -gt 0 ] && read -rt "$left" <> <(:)
    scontrol requeue "$job"
}}
"""


_WARN_AND_REQUEUE = """\
# Pass on Slurm's warning (the time limit is near, or the job is being preempted) to every rank. It may arrive before
# $run holds the process ID.
warn() {
    warned=yes
    run=${run:-$!} # From here on $! is the timer.
    kill -USR1 "$run"
    requeue_in_time &
    timer=$!
}

# Slurm is ending the job, and signals its processes itself.
end() {
    ending=yes
}

trap warn USR1
trap end TERM
"""

_WAIT = """\
run=${run:-$!}
wait "$run"
code=$?
# A signal interrupts wait, not the training.
while kill -0 "$run" 2>/dev/null; do
    wait "$run"
    code=$?
done
# If it ended right after a signal, $code is still the signal's. 127: there is nothing left to wait for.
wait "$run" 2>/dev/null
last=$?
[ "$last" -eq 127 ] || code=$last
"""

_REQUEUE = """\
[ -n "$timer" ] && kill "$timer" 2>/dev/null
# It stopped because of the warning: requeue it, unless Slurm is ending the job.
if [ "$code" -ne 0 ] && [ -n "$warned" ] && [ -z "$ending" ]; then
    echo "requeueing job $job: Slurm starts it again" >&2
    scontrol requeue "$job"
fi
"""
