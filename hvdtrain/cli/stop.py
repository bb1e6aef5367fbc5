"""`hvdtrain stop`: end a job."""

from __future__ import annotations

import time

import click

from hvdtrain.cli.launch_options import Seconds
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.running.timed_command import ANSWER_SECONDS, ask
from hvdtrain.launch.running_jobs import Job, find_jobs, the_job

POLL_SECONDS = 0.2
SECONDS = 45.0
"""Default time limit: longer than the default of `hvdtrain run --grace-seconds`."""


@click.command()
@click.argument("job", required=False, metavar="JOB")
@click.option(
    "--timeout", type=Seconds(min=0), default=SECONDS, show_default=True, metavar="SECONDS",
    help="Time to wait for JOB to end.",
)  # fmt: skip
def stop(job: str | None, timeout: float) -> None:
    """End JOB, a name from `hvdtrain ps`, and wait until it has ended.

    A run is sent SIGTERM, a Slurm job is cancelled (scancel), a container is stopped (docker stop).
    """
    jobs = find_jobs()
    if job is None:
        names = ", ".join(one.name for one in jobs)
        raise UsageError(f"which one? hvdtrain stop JOB; running: {names or 'none'}")
    found = the_job(job, jobs)
    deadline = time.monotonic() + timeout
    done = ask(found.stop, limit=max(timeout, ANSWER_SECONDS))  # `docker stop` waits for the end.
    if done.returncode:
        raise HvdtrainError(f"cannot end {found.name}: {done.last_line}")
    while _is_there(found):
        if time.monotonic() > deadline:
            raise HvdtrainError(
                f"{found.name} was asked to stop but is still running after {timeout:g} s"
            )
        time.sleep(POLL_SECONDS)
    click.echo(f"{found.name} has ended")


def _is_there(job: Job) -> bool:
    return any((one.kind, one.name) == (job.kind, job.name) for one in find_jobs())
