"""`hvdtrain logs`: show the output of a job, running or ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click

from hvdtrain.errors import UsageError
from hvdtrain.launch.running.log_folder import LOGS, is_running
from hvdtrain.launch.running.processes import start
from hvdtrain.launch.running.run_status import read_status
from hvdtrain.launch.running_jobs import Job, find_jobs, the_job
from hvdtrain.launch.slurm.job_queue import follow_job
from hvdtrain.signals import shell_code

POLL_SECONDS = 0.2
_MOST_NAMED = 5


@click.command()
@click.argument("job", required=False)
@click.option("--rank", default="0", show_default=True, metavar="N", help="Rank of the worker.")
@click.option("--stderr", is_flag=True, help="Show standard error instead of standard output.")
@click.option("--follow", "-f", is_flag=True, help="Keep showing new output until the run ends.")
def logs(job: str | None, rank: str, stderr: bool, follow: bool) -> None:
    """Show the output of one worker of JOB.

    JOB is a name from `hvdtrain ps`, or a log folder. Default: the latest run in the current folder.
    """
    folder = _folder(job)
    if isinstance(folder, Job):
        sys.exit(_show(folder, follow))
    stream = "stderr" if stderr else "stdout"
    path = next(
        (p for name in (f"rank.{rank}", rank) if (p := folder / name / stream).exists()), None
    )
    if path is None and not (follow and is_running(folder)):
        have = sorted(p.name for p in folder.iterdir() if p.is_dir())
        if {f"rank.{rank}", rank} & set(have) or not have:
            more = ": --follow waits for it" if is_running(folder) else ""
            click.echo(f"rank {rank} has written nothing to {stream}{more}", err=True)
            return
        ranks = ", ".join(name.removeprefix("rank.") for name in have)
        raise UsageError(f"--rank {rank}: no such rank in {folder}; available: {ranks}")
    for data in _new(path or folder / f"rank.{rank}" / stream, folder, follow):
        click.echo(data, nl=False)


def _show(job: Job, follow: bool) -> int:
    """Show all output of a batch job or container whose log folder is unknown. Returns the exit code."""
    if follow and job.kind == "slurm":
        return follow_job(job.name, sys.stdout.buffer, partial(click.echo, err=True))
    *command, name = job.show
    more = ["--follow"] if follow else []  # Before the name, as podman accepts no options after it.
    shown = [*command, *more, name]
    with start(
        shown, os.environ, stdin=subprocess.DEVNULL, output=None, session=False, dies_with_us=True
    ) as process:
        return shell_code(process.wait())


def _folder(job: str | None) -> Path | Job:
    """Return the log folder, or the job if it has none."""
    if job is None:
        if not (found := _log_dirs()):
            raise UsageError(
                f"there are no logs in {LOGS} here: specify a job that hvdtrain ps lists"
            )
        return found[-1]
    for folder in (Path(job), LOGS / job):
        if job and folder.is_dir():
            return folder
    try:
        one = the_job(job, find_jobs())
    except UsageError as error:
        names = ", ".join(path.name for path in _log_dirs()[-_MOST_NAMED:])
        raise UsageError(f"{error}; latest in {LOGS}: {names or 'none'}") from None
    return one.log_dir or one


def _log_dirs() -> list[Path]:
    """Return the log folders here, in the order in which their runs were started."""
    return sorted((path for path in LOGS.glob("*") if path.is_dir()), key=_started)


def _started(folder: Path) -> float:
    status = read_status(folder)
    return status.started if status is not None else folder.stat().st_mtime


def _new(path: Path, folder: Path, follow: bool) -> Iterator[bytes]:
    """Yield the content of the file, and with `follow` all that is added until the run ends."""
    at = 0
    while True:
        going = follow and is_running(folder)
        if path.exists():
            with path.open("rb") as file:
                file.seek(at)
                while data := file.read(65536):
                    at += len(data)
                    yield data
        if not going:
            return
        time.sleep(POLL_SECONDS)
