"""`hvdtrain logs`: the output of what runs or ran."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from hvdtrain.errors import UsageError
from hvdtrain.launch.jobs.find import find_jobs, the_job
from hvdtrain.launch.running.log_folder import is_running

POLL_SECONDS = 0.2
_LOGS = Path(".hvdtrain/logs")


@click.command()
@click.argument("job", required=False)
@click.option("--rank", default="0", show_default=True, metavar="N", help="Of which worker.")
@click.option("--stderr", is_flag=True, help="Its standard error in place of its standard output.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until the run ends.")
def logs(job: str | None, rank: str, stderr: bool, follow: bool) -> None:
    """Show what a worker of JOB has written.

    JOB is what `hvdtrain ps` calls it, or a log folder. Without JOB: the newest run of this folder.
    """
    folder = _folder(job)
    if isinstance(folder, tuple):
        sys.exit(subprocess.run(folder, stdin=subprocess.DEVNULL).returncode)
    stream = "stderr" if stderr else "stdout"
    path = next(
        (p for name in (f"rank.{rank}", rank) if (p := folder / name / stream).exists()), None
    )
    if path is None and not (follow and is_running(folder)):
        have = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir())) or "nothing yet"
        raise UsageError(
            f"worker {rank} has written nothing to {stream} in {folder}; written: {have}"
        )
    for data in _new(path or folder / f"rank.{rank}" / stream, folder, follow):
        click.echo(data, nl=False)


def _folder(job: str | None) -> Path | tuple[str, ...]:
    """The log folder, or the command that shows the output where there is none."""
    if job is None:
        found = sorted((p for p in _LOGS.glob("*") if p.is_dir()), key=lambda p: p.stat().st_mtime)
        if not found:
            raise UsageError(
                f"no run has kept its output in {_LOGS} here: name a job of hvdtrain ps"
            )
        return found[-1]
    for folder in (Path(job), _LOGS / job):
        if folder.is_dir():
            return folder
    one = the_job(job, find_jobs())
    return one.log_dir or one.show


def _new(path: Path, folder: Path, follow: bool) -> Iterator[bytes]:
    """What is in the file, and with `follow` what comes until the run has ended."""
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
