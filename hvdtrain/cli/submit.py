"""`hvdtrain submit`: run a training script as a Slurm job."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.forwarded_options import RunPart, ThroughRun
from hvdtrain.cli.hidden_values import conceal_secrets, without_values
from hvdtrain.cli.launch_options import PATH
from hvdtrain.environment import EXIT_INTERRUPTED
from hvdtrain.errors import UsageError
from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.option_types import options_of
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.plan_validation import check_given, check_image, check_servers
from hvdtrain.launch.rank_program import program_given
from hvdtrain.launch.secrets import variable_to_pass
from hvdtrain.launch.slurm.job_queue import (
    SCRIPTS,
    SlurmUnreachable,
    follow_job,
    sbatch_argv,
    submit_job,
)
from hvdtrain.launch.slurm.sbatch import JobRequest, batch_script, default_warning, secret_words
from hvdtrain.strategy_names import HOROVOD, choose_strategy


@click.command(cls=ThroughRun)
@click.option("-N", "--nodes", type=int, default=1, show_default=True, help="Number of nodes.")
@click.option(
    "--tasks-per-node", "--ntasks-per-node", "tasks_per_node", type=int, metavar="N",
    help="Workers per node.  [default: one per GPU, else one]",
)  # fmt: skip
@click.option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs per node.")
@click.option("-c", "--cpus-per-task", type=int, metavar="N", help="Cores per worker.")
@click.option("--mem", "memory", metavar="SIZE", help="Memory per node, such as 64G.")
@click.option(
    "-t", "--time", metavar="TIME",
    help="Time limit: minutes, H:MM:SS or D-HH:MM:SS.",
)  # fmt: skip
@click.option("-p", "--partition", metavar="NAME", help="Partition to submit to.")
@click.option("-A", "--account", metavar="NAME", help="Account to charge.")
@click.option("--qos", metavar="NAME", help="Quality of service.")
@click.option(
    "-a", "--array", metavar="NUMBERS",
    help="Submit a job array: one job per number, such as 0-3 or 0-99%4 (four at a time). The script finds its "
    "number in SLURM_ARRAY_TASK_ID.",
)  # fmt: skip
@click.option(
    "-J", "--job-name", metavar="NAME", help="Name of the job.  [default: the name of SCRIPT]"
)
@click.option(
    "-o", "--output", metavar="FILE",
    help="File for the job's output; may use Slurm's %-patterns.  [default: .hvdtrain/jobs/%x-%j.out]",
)  # fmt: skip
@click.option("--mail-type", metavar="EVENTS", help="When to send mail, such as END,FAIL.")
@click.option("--mail-user", metavar="ADDRESS", help="Where to send it.")
@click.option(
    "--sbatch", "directives", multiple=True, metavar="OPTION",
    help="Pass another option to sbatch, such as --sbatch=--constraint=a100. May be repeated.",
)  # fmt: skip
@click.option(
    "--warning", "warning_seconds", type=int, metavar="SECONDS",
    help="Send SIGUSR1 to every worker this long before the time limit, or when the job is preempted.  "
    "[default: 120 with --requeue, else none]",
)  # fmt: skip
@click.option(
    "--requeue", is_flag=True,
    help="Requeue the job if the time limit ends it before the training is complete. The script finds the number of "
    "restarts in SLURM_RESTART_COUNT.",
)  # fmt: skip
@click.option(
    "--script-file", type=PATH, metavar="FILE",
    help="Where to write the batch script.  [default: .hvdtrain/jobs/NAME-TIME.sbatch]",
)  # fmt: skip
@click.option(
    "--wait", is_flag=True, help="Show the job's output until it ends, and exit with its code."
)
@click.option(
    "--dry-run", is_flag=True, help="Print the batch script and the command; submit nothing."
)
@click.pass_context
def submit(
    ctx: click.Context, script_file: Path | None, wait: bool, dry_run: bool, **job: Any
) -> None:
    """Run SCRIPT as a Slurm job: write a batch script and submit it.

    The job calls `hvdtrain run` with the options given here, and starts one worker per task. ARGUMENTS are passed
    to SCRIPT. Prints the job ID.
    """
    part: RunPart = ctx.obj
    values = part.read(ctx).params
    if not dry_run:
        conceal_secrets(values["env"], part.program[1:])
    check_run(values)
    job["job_name"] = job["job_name"] or _name(values)
    job["output"] = job["output"] or str(
        SCRIPTS / ("%x-%A_%a.out" if job["array"] else "%x-%j.out")
    )
    if job["requeue"] and job["warning_seconds"] is None:
        job["warning_seconds"] = default_warning(job["time"])
    request = JobRequest(command=_command(part, values["env"]), **job)
    path = script_file or _new_file(request.job_name)
    if dry_run:
        _print(request, path)
        return
    _write(path, batch_script(request), replacing=script_file is not None)
    _make_folder(Path(request.output).parent)
    os.environ.update(secret_words(request.command))  # The job inherits this environment.
    try:
        job_id = submit_job(path)
    except (UsageError, SlurmUnreachable):
        # Slurm has not seen it, so there is nothing to look at.
        if script_file is None:
            path.unlink()
        raise
    click.echo(job_id)
    # Each job of an array has its own number.
    known = {} if request.array else {"%x": request.job_name, "%j": job_id}
    output = request.output
    for pattern, value in known.items():
        output = output.replace(pattern, value)
    click.echo(f"script: {path}\noutput: {output}", err=True)
    if wait:
        sys.exit(_follow(job_id))


def _command(part: RunPart, variables: Iterable[EnvVar]) -> tuple[str, ...]:
    """Return the job's `hvdtrain run` command. Secrets are passed in the job's environment, not in a file."""
    secrets = [one.name for one in map(variable_to_pass, variables) if one.value is None]
    words = without_values(part.words, secrets, len(part.program))
    return (*_hvdtrain(), "run", *words)


def _name(values: Mapping[str, Any]) -> str:
    """Return the default name of the job, from its program."""
    program = program_given(values)
    name = program.name.name if program.kind == "module" else program.name.stem
    return name or "job"


def check_run(values: Mapping[str, Any]) -> None:
    """Check for errors that `hvdtrain run` would report on any machine, before the job is queued. Raises UsageError."""
    check_given(program_given(values), options_of(LaunchPlan), values)
    name = choose_strategy(values["strategy"]).name
    check_servers(name, values["workers"], values["ps"])
    if values["container"] is not None:
        check_image(values["container"])
    if values["container"] is not None and name != HOROVOD:
        raise UsageError(f"--container has no effect with --strategy {name}: leave it out")


def _print(request: JobRequest, path: Path) -> None:
    click.echo(os.fsencode(f"{batch_script(request)}\n# {shlex.join(sbatch_argv(path))}"))
    if names := secret_words(request.command):
        click.echo(
            f"before you submit this, set {', '.join(names)}: secret values are left out of it",
            err=True,
        )


def _hvdtrain() -> tuple[str, ...]:
    """Return the command of this hvdtrain, even if its environment is not activated."""
    program = Path(sys.executable).parent / "hvdtrain"
    return (str(program),) if program.is_file() else (sys.executable, "-P", "-m", "hvdtrain.cli")


def _follow(job_id: str) -> int:
    try:
        return follow_job(job_id, sys.stdout.buffer, lambda text: click.echo(text, err=True))
    except KeyboardInterrupt:
        click.echo(f"\njob {job_id} continues; to cancel it: scancel {job_id}", err=True)
        return EXIT_INTERRUPTED


def _new_file(job_name: str) -> Path:
    stem = f"{job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = SCRIPTS / f"{stem}.sbatch", 2
    while path.exists():
        path, number = SCRIPTS / f"{stem}-{number}.sbatch", number + 1
    return path


def _write(path: Path, text: str, replacing: bool) -> None:
    """Write a batch script that only its owner can read and run."""
    _make_folder(path.parent)
    try:
        # Devices and pipes are not replaced: as root, that would remove /dev/null from the machine.
        if replacing and path.is_file() and not path.is_symlink():
            path.unlink()
        with open(path, "xb", opener=partial(os.open, mode=0o700)) as file:
            file.write(os.fsencode(text))
    except OSError as error:
        raise UsageError(f"cannot write the batch script {path}: {error.strerror}") from error


def _make_folder(folder: Path) -> None:
    """Create the folder of the job's output. Slurm does not create it, and the job would fail without a message."""
    if "%" in str(folder):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the folder {folder}: {error.strerror}") from error
