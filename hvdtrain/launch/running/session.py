"""One launch from its plan to its exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from hvdtrain.environment import LOG_DIR, TERMINAL
from hvdtrain.launch.running.log_folder import make_log_dir
from hvdtrain.launch.running.members import RANKS, Members
from hvdtrain.launch.running.outcome import outcome_of
from hvdtrain.launch.running.output import Output
from hvdtrain.launch.running.process import run_process

_WARNED = "\nSIGUSR1: this job will be ended soon; all ranks are told"


@dataclass(frozen=True)
class View:
    """What of a run the user sees, and where the rest is kept.

    Attributes:
        log_dir: folder of this run's files; None makes one under `.hvdtrain/logs`.
        all_ranks: show the output of all ranks.
        verbose: show what the launcher says.
        timestamps: put the time in front of each line of the ranks.
    """

    log_dir: Path | None = None
    all_ranks: bool = False
    verbose: bool = False
    timestamps: bool = False


def run_launch(
    argv: Sequence[str],
    view: View,
    *,
    environ: Mapping[str, str] | None = None,
    elastic: bool = False,
    members: Members = RANKS,
) -> int:
    """Run a launch command; show, keep and judge its output. Returns the exit code for the user.

    Args:
        argv: the command.
        view: what the user sees.
        environ: of the command; None: of this process.
        elastic: the others go on without a rank that fails, and may come to a good end.
        members: what its processes are called.
    """
    log_dir = make_log_dir(view.log_dir)
    as_alone = sys.stdout.isatty() and not view.all_ranks
    environment = {
        **(os.environ if environ is None else environ),
        LOG_DIR: str(log_dir.resolve()),
        TERMINAL: "1" if as_alone else "0",
    }
    output = Output(
        log_dir,
        _unbuffered(sys.stdout),
        _unbuffered(sys.stderr),
        all_ranks=view.all_ranks,
        show_launcher=view.verbose,
        stamp=_time_of_day if view.timestamps else None,
        members=members,
    )
    with output:
        ending = run_process(
            argv,
            environment=environment,
            launch_id=uuid.uuid4().hex,
            on_output=output.feed,
            on_idle=output.settle,
            on_signal=lambda received: output.say(_stopping(received, output.unread, members)),
            on_warning=lambda: output.say(_WARNED),
            has_failed=lambda: bool(output.failures) and not elastic,
            is_unread=lambda: output.unread,
        )
        if ending.at_once:
            output.leave_terminal()
        output.finish()
        failures = [] if elastic and ending.returncode == 0 else output.failures
        text = output.launcher_text.decode(errors="replace")
        outcome = outcome_of(ending, failures, text, log_dir, members)
        if outcome.message:
            output.say(outcome.message)
    return outcome.exit_code


def _unbuffered(stream: TextIO) -> BinaryIO:
    """The stream's bytes. A buffer would be written again at the end, to where it cannot be."""
    return open(stream.fileno(), "wb", buffering=0, closefd=False)


def _time_of_day() -> bytes:
    return time.strftime("%Y-%m-%d %H:%M:%S ").encode()


def _stopping(received: signal.Signals, unread: bool, members: Members) -> str:
    why = "nobody reads the output" if unread else received.name
    what = "all ranks" if members == RANKS else "the run"
    return f"\n{why}: stopping {what} (again: at once)"
