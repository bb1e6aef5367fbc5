"""One launch from its plan to its exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from hvdtrain.environment import LOG_DIR, TERMINAL
from hvdtrain.launch.running.log_folder import make_log_dir
from hvdtrain.launch.running.lookout import from_json
from hvdtrain.launch.running.members import RANKS, Members
from hvdtrain.launch.running.outcome import outcome_of
from hvdtrain.launch.running.output import Output
from hvdtrain.launch.running.process import run_process
from hvdtrain.launch.running.streams import Stream
from hvdtrain.launch.running.watchdog import Limits, Watchdog

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


@dataclass(frozen=True)
class Patience:
    """How long a run is waited for.

    Attributes:
        grace: seconds for scripts that have a handler for the signal that ends the run.
        limits: of the watchdog; None only looks on.
    """

    grace: float = 0.0
    limits: Limits | None = None


def run_launch(
    argv: Sequence[str],
    view: View,
    patience: Patience,
    *,
    environ: Mapping[str, str] | None = None,
    elastic: bool = False,
    members: Members = RANKS,
) -> int:
    """Run a launch command; show, keep and judge its output. Returns the exit code for the user.

    Args:
        argv: the command.
        view: what the user sees.
        patience: how long it is waited for.
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
    run = _ShownRun(output, Watchdog(None if elastic else patience.limits), members, elastic)
    output.on_news = run.take_news
    with output:
        ending = run_process(
            argv, run, environment=environment, launch_id=uuid.uuid4().hex, grace=patience.grace
        )
        if ending.at_once:
            output.leave_terminal()
        output.finish()
        outcome = outcome_of(
            ending,
            [] if elastic and ending.returncode == 0 else output.failures,
            output.launcher_text.decode(errors="replace"),
            log_dir,
            members,
            hung=run.hung,
            absent=run.watchdog.absent({failure.rank for failure in output.failures}),
        )
        if outcome.message:
            output.say(outcome.message)
    return outcome.exit_code


@dataclass
class _ShownRun:
    """A run whose output is shown and whose ranks are watched.

    Attributes:
        hung: why the watchdog ended it; empty if it did not.
    """

    output: Output
    watchdog: Watchdog
    members: Members
    elastic: bool
    hung: str = ""

    def take_output(self, stream: Stream, data: bytes) -> None:
        self.output.feed(stream, data)

    def take_news(self, line: bytes) -> None:
        with suppress(ValueError, TypeError, KeyError):
            news = json.loads(line)
            self.watchdog.hear(from_json(news.get("ranks", [])))
            if "left" in news:
                self.output.say(f"\nended what the script has left behind: {news['left']}")

    def idle(self) -> None:
        self.output.settle()

    def stopping(self, received: signal.Signals) -> None:
        self.output.say(_stopping(received, self.output.unread, self.members))

    def warning(self) -> None:
        self.output.say(_WARNED)

    def has_failed(self) -> bool:
        return bool(self.output.failures) and not self.elastic

    def is_hung(self) -> bool:
        if not self.hung and (reason := self.watchdog.verdict()):
            self.hung = reason
            self.output.say("\nthis run hangs: its ranks show their stacks, and are ended")
        return bool(self.hung)

    def is_unread(self) -> bool:
        return self.output.unread


def _unbuffered(stream: TextIO) -> BinaryIO:
    """The stream's bytes. A buffer would be written again at the end, to where it cannot be."""
    return open(stream.fileno(), "wb", buffering=0, closefd=False)


def _time_of_day() -> bytes:
    return time.strftime("%Y-%m-%d %H:%M:%S ").encode()


def _stopping(received: signal.Signals, unread: bool, members: Members) -> str:
    why = "nobody reads the output" if unread else received.name
    what = "all ranks" if members == RANKS else "the run"
    return f"\n{why}: stopping {what} (again: at once)"
