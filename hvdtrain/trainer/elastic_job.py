"""The Trainer in an elastic job: when workers join or leave, every remaining worker restarts its script.

Traced steps, shares and communicators all depend on the number of workers, so all of them must be created again. The
restarted script resumes from the newest checkpoint, exactly as a killed run does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from horovod.common.elastic import notification_manager

from hvdtrain.environment import START_FOLDER
from hvdtrain.errors import EngineError, HvdtrainError
from hvdtrain.messages import logger
from hvdtrain.rank_variables import is_elastic
from hvdtrain.runtime import Rank, engine_errors
from hvdtrain.worker.elastic_place import has_saved, place_in_job
from hvdtrain.worker.proc_files import environment_of

if TYPE_CHECKING:
    from hvdtrain.trainer.resume import FitCheckpoints

STARTED_AGAIN = "HVDTRAIN_STARTED_AGAIN"
"""Variable that holds the number of saved steps, and how often the script has restarted since they were saved."""
SAVED_BEFORE = "HVDTRAIN_SAVED_BEFORE"
"""Variable that is set in a restarted process for its first fit, if a checkpoint had been written before."""
MOST_STARTS = 3
"""Maximum number of restarts without a new checkpoint: what fails this often would fail again."""


class WorkersChanged(HvdtrainError):
    """The number of workers is about to change, and the training has saved a checkpoint."""


class HostChanges:
    """Listener for the elastic launcher's notifications about hosts.

    Attributes:
        heard: Whether hosts have joined or left since listening began. Only rank 0 is notified.
    """

    def __init__(self) -> None:
        self.heard = False

    def on_hosts_updated(self, timestamp: float, update: Any) -> None:
        """Record a change; called by Horovod in a thread of its own."""
        self.heard = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for changes in this block, if the job is elastic."""
        if not is_elastic(os.environ):
            yield
            return
        # Register first: earlier changes are delivered at once.
        notification_manager.register_listener(self)
        notification_manager.init()
        try:
            yield
        finally:
            notification_manager.remove_listener(self)


def start_again(error: HvdtrainError, steps: int, exists: bool) -> NoReturn:
    """Replace this process by a new one with the same command and the environment that the launcher gave it.

    Args:
        error: Reason for the restart.
        steps: Number of steps trained at the newest checkpoint; 0 if there is none.
        exists: Whether a checkpoint is known to have been written.

    Raises:
        EngineError: If the script has restarted MOST_STARTS times without a new checkpoint, or the launcher has ended.
        SystemExit: If the job continues without this worker.
    """
    times = starts_before(os.environ, steps) + 1
    if times > MOST_STARTS:
        raise EngineError(
            f"{error} The script was restarted {MOST_STARTS} times without reaching a new checkpoint"
        ) from error
    logger().warning("workers have joined or left: restarting the script")
    environ = _given() | place_in_job(os.environ) | {STARTED_AGAIN: f"{steps} {times}"}
    environ.pop(SAVED_BEFORE, None)
    if exists or SAVED_BEFORE in os.environ:
        environ[SAVED_BEFORE] = "1"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if START_FOLDER in os.environ:
        os.chdir(os.environ[START_FOLDER])  # The script's own path may be relative.
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def starts_before(environ: Mapping[str, str], steps: int) -> int:
    """Return how often the script has restarted since it saved after `steps` steps, according to `environ`."""
    saved, _, times = environ.get(STARTED_AGAIN, "").partition(" ")
    return int(times) if saved == str(steps) and times.isdecimal() else 0


def resume_after_restart(environ: MutableMapping[str, str], resume: str) -> str:
    """Return the argument `resume` of a fit that begins, in a process that may have been restarted, or joined a job.

    The first fit of such a process must find a checkpoint if one was written before: without one, it looks in
    another folder, for instance on another disk. Later fits may be new. None may insist on an empty folder, because it
    may have begun before.

    Args:
        environ: Environment of this process, on any rank; afterwards it tells that this fit was not the first.
        resume: The Trainer's argument.
    """
    if is_elastic(environ) and STARTED_AGAIN not in environ:
        # This process has saved nothing yet; the others may all have gone.
        environ[STARTED_AGAIN] = ""
        if has_saved(environ):
            environ.update({STARTED_AGAIN: "0 0", SAVED_BEFORE: "1"})
    if environ.pop(SAVED_BEFORE, None) is not None:
        return "must"
    return "auto" if resume == "never" and environ.get(STARTED_AGAIN) else resume


def _given() -> dict[str, str]:
    """Return the environment this process began with, before threads were divided among the former workers."""
    environ = environment_of(os.getpid())
    # A program that sets its title in `ps` overwrites this memory.
    return environ if is_elastic(environ) else dict(os.environ)


@contextmanager
def in_job(rank: Rank, saved: FitCheckpoints | None) -> Iterator[None]:
    """Convert the failure of a collective in this block to an EngineError.

    In an elastic job whose Trainer has checkpoints, restart the script instead.
    """
    try:
        with engine_errors(rank):
            yield
    except (EngineError, WorkersChanged) as error:
        if saved is None or not is_elastic(os.environ):
            raise
        start_again(error, saved.saved_steps, saved.exists)
