"""`hvdtrain submit`: a training script as a Slurm job."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.concealment import conceal_secrets, without_values
from hvdtrain.cli.options import PATH
from hvdtrain.cli.through_run import RunPart, ThroughRun
from hvdtrain.environment import EXIT_INTERRUPTED
from hvdtrain.errors import UsageError
from hvdtrain.launch.options import settings_of
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.program import program_of
from hvdtrain.launch.rules import check_bounds, check_image, check_script
from hvdtrain.launch.secrets import MASK, masked, variable_to_pass
from hvdtrain.launch.slurm.jobs import follow_job, sbatch_argv, submit_job
from hvdtrain.launch.slurm.sbatch import JobRequest, batch_script, default_warning
from hvdtrain.launch.variables import EnvVar
from hvdtrain.strategy_names import HOROVOD, PARAMETER_SERVER, choose_strategy

FOLDER = Path(".hvdtrain/jobs")
_ASIDE = "such as --sbatch=--constraint=a100"


@click.command(cls=ThroughRun)
@click.option("-N", "--nodes", type=int, default=1, show_default=True, help="Number of nodes.")
@click.option(
    "--tasks-per-node", "--ntasks-per-node", "tasks_per_node", type=int, metavar="N",
    help="Workers on each node.  [default: one for each GPU, else one]",
)  # fmt: skip
@click.option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs on each node.")
@click.option("-c", "--cpus-per-task", type=int, metavar="N", help="Cores for each worker.")
@click.option("--mem", "memory", metavar="SIZE", help="Memory of each node, such as 64G.")
@click.option(
    "-t", "--time", "time_limit", metavar="TIME",
    help="Time limit: minutes, H:MM:SS or D-HH:MM:SS.",
)  # fmt: skip
@click.option("-p", "--partition", metavar="NAME", help="Where the job waits for nodes.")
@click.option("-A", "--account", metavar="NAME", help="Who pays for it.")
@click.option("--qos", metavar="NAME", help="Quality of service.")
@click.option(
    "-a", "--array", metavar="NUMBERS",
    help="Run the job once for each of these, such as 0-3 or 0-99%4 (four at a time); the script "
    "finds its number in SLURM_ARRAY_TASK_ID.",
)  # fmt: skip
@click.option("-J", "--job-name", metavar="NAME", help="[default: the script's]")
@click.option(
    "-o", "--output", metavar="FILE",
    help="For what the job says, with Slurm's %-patterns.  [default: .hvdtrain/jobs/%x-%j.out]",
)  # fmt: skip
@click.option("--mail-type", metavar="EVENTS", help="When to write a mail, such as END,FAIL.")
@click.option("--mail-user", metavar="ADDRESS", help="To whom.")
@click.option(
    "--sbatch", "directives", multiple=True, metavar="OPTION",
    help=f"Any other option of sbatch, {_ASIDE}; again for each.",
)  # fmt: skip
@click.option(
    "--warning", "warning_seconds", type=int, metavar="SECONDS",
    help="SIGUSR1 to every worker this long before the time limit, or when the job is preempted.  "
    "[default: 120 with --requeue, else none]",
)  # fmt: skip
@click.option(
    "--requeue", is_flag=True,
    help="Back into the queue when the time is over before the training; the script finds the "
    "number of restarts in SLURM_RESTART_COUNT.",
)  # fmt: skip
@click.option(
    "--script-file", type=PATH, metavar="FILE",
    help="Where to write the batch script.  [default: .hvdtrain/jobs/NAME-TIME.sbatch]",
)  # fmt: skip
@click.option("--wait", is_flag=True, help="Show the job's output, and end as the job ends.")
@click.option(
    "--dry-run", is_flag=True, help="Print the batch script and the command, and submit nothing."
)
@click.pass_context
def submit(
    ctx: click.Context, script_file: Path | None, wait: bool, dry_run: bool, **asked: Any
) -> None:
    """Run SCRIPT as a Slurm job: write a batch script and submit it.

    What follows SCRIPT is the script's own. The job runs `hvdtrain run`, with its options as they are given
    here; it starts a worker for each task of the job. Standard output gets the job's number alone.
    """
    part: RunPart = ctx.obj
    values = part.read(ctx).params
    if not dry_run:
        conceal_secrets(values["env"], part.program[1:])
    check_run(values)
    request = request_of(_command(part, values["env"]), _name(values), **asked)
    path = script_file or _new_file(request.job_name)
    if dry_run:
        _print(request, path)
        return
    _write(path, batch_script(request), replacing=script_file is not None)
    _make_folder(Path(request.output).parent)
    job_id = submit_job(path)
    click.echo(job_id)
    click.echo(f"script: {path}\noutput: {request.output}", err=True)
    if wait:
        sys.exit(_follow(job_id))


def request_of(
    command: tuple[str, ...],
    name: str,
    *,
    time_limit: str | None,
    job_name: str | None,
    output: str | None,
    array: str | None,
    warning_seconds: int | None,
    requeue: bool,
    **resources: Any,
) -> JobRequest:
    """The job that the options ask for; `name` is its name by default. Raises UsageError."""
    if requeue and warning_seconds is None:
        warning_seconds = default_warning(time_limit)
    pattern = "%x-%A_%a.out" if array else "%x-%j.out"
    return JobRequest(
        command=command,
        job_name=job_name or name,
        output=output or str(FOLDER / pattern),
        time=time_limit,
        array=array,
        warning_seconds=warning_seconds,
        requeue=requeue,
        **resources,
    )


def _command(part: RunPart, variables: Iterable[EnvVar]) -> tuple[str, ...]:
    """The `hvdtrain run` of the job. A secret travels in the job's environment, not in a file."""
    secrets = [one.name for one in map(variable_to_pass, variables) if one.value is None]
    words = without_values(part.words, secrets, len(part.program))
    return (*_hvdtrain(), "run", *words)


def _name(values: Mapping[str, Any]) -> str:
    """Of what runs."""
    program = program_of(values["script"], values["arguments"], module=values["module"])
    name = program.name.name if program.kind == "module" else program.name.stem
    return name or "job"


def check_run(values: Mapping[str, Any]) -> None:
    """Raise UsageError for what `hvdtrain run` would refuse wherever it runs, before the job waits."""
    program = program_of(values["script"], values["arguments"], module=values["module"])
    if program.kind == "script":
        check_script(program.name)
    for setting in settings_of(LaunchPlan):
        check_bounds(setting, values[setting.field])
    name = choose_strategy(values["strategy"]).name
    for option, number in (("--workers", values["workers"]), ("--ps", values["ps"])):
        if number is not None and name != PARAMETER_SERVER:
            raise UsageError(f"{option} is for --strategy {PARAMETER_SERVER}")
        if number is not None and number < 1:
            raise UsageError(f"{option} {number}: give at least 1")
    if values["container"] is not None:
        check_image(values["container"])
    if values["container"] is not None and name != HOROVOD:
        raise UsageError(f"--container has no effect with --strategy {name}: leave it out")


def _print(request: JobRequest, path: Path) -> None:
    shown = replace(request, command=tuple(masked(request.command)))
    click.echo(f"{batch_script(shown)}\n# {shlex.join(sbatch_argv(path))}")
    if shown != request:
        click.echo(f"before you submit this, put the secret values where {MASK} is", err=True)


def _hvdtrain() -> tuple[str, ...]:
    """This hvdtrain, also where the environment is not activated."""
    program = Path(sys.executable).parent / "hvdtrain"
    return (str(program),) if program.is_file() else (sys.executable, "-P", "-m", "hvdtrain.cli")


def _follow(job_id: str) -> int:
    try:
        return follow_job(job_id, sys.stdout.buffer, lambda text: click.echo(text, err=True))
    except KeyboardInterrupt:
        click.echo(f"\njob {job_id} goes on; to cancel it: scancel {job_id}", err=True)
        return EXIT_INTERRUPTED


def _new_file(job_name: str) -> Path:
    stem = f"{job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = FOLDER / f"{stem}.sbatch", 2
    while path.exists():
        path, number = FOLDER / f"{stem}-{number}.sbatch", number + 1
    return path


def _write(path: Path, text: str, replacing: bool) -> None:
    """Write a batch script, which only its owner may read: the script's arguments are in it."""
    _make_folder(path.parent)
    try:
        if replacing:
            path.unlink(missing_ok=True)
        with open(path, "x", encoding="utf-8", opener=partial(os.open, mode=0o700)) as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write the batch script {path}: {error.strerror}") from error


def _make_folder(folder: Path) -> None:
    """Slurm makes no folder for a job's output: the job would fail without a word."""
    if "%" in str(folder):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from error
