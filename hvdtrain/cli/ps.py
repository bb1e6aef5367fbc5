"""`hvdtrain ps`: list running jobs."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from hvdtrain.launch.running_jobs import Job, find_jobs
from hvdtrain.view.live_view import duration

_COLUMNS = ("JOB", "KIND", "STATE", "RANKS", "PHASE", "STEP", "TIME", "COMMAND")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one job per line.")
def ps(as_json: bool) -> None:
    """List your runs on this machine, and your Slurm jobs and containers that hvdtrain started.

    PHASE and STEP are those of the slowest worker.
    """
    jobs = find_jobs()
    if as_json:
        for job in jobs:
            click.echo(json.dumps(asdict(job), default=str))
        return
    rows = [_COLUMNS, *map(_row, jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS) - 1)]
    for row in rows:
        row = tuple(map(_in_one_line, row))
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[-1]]))


def _row(job: Job) -> tuple[str, ...]:
    status = job.status
    return (
        *(job.name, job.kind, job.state),
        str(status.ranks) if status and status.ranks else "-",
        (status.phase if status else "") or "-",
        str(status.step) if status and status.step else "-",
        "-" if job.seconds is None else duration(job.seconds),
        job.command,
    )


def _in_one_line(text: str) -> str:
    """Escape non-printable characters: a command may contain any, and some move the cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
