"""Run a launch, from the command that starts it to its exit code."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.environment import (
    DRAWN,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_SIGNAL_BASE,
    EXIT_TERMINATED,
    EXIT_USAGE,
    HANG_TIMEOUT,
    LOG_DIR,
    STOPPED_SECONDS,
    TERMINAL,
)
from hvdtrain.errors import UsageError
from hvdtrain.launch.running.command_runner import run_process
from hvdtrain.launch.running.live_rows import LiveRows
from hvdtrain.launch.running.log_folder import make_log_dir
from hvdtrain.launch.running.outcome import Outcome, outcome_of
from hvdtrain.launch.running.output import Output
from hvdtrain.launch.running.output_writers import bytes_of
from hvdtrain.launch.running.process_names import RANKS, ProcessNames, ranks_in_words
from hvdtrain.launch.running.rank_monitor import RankMonitor, from_json
from hvdtrain.launch.running.run_status import WRITE_SECONDS, RunStatus
from hvdtrain.launch.running.stopped_programs import StoppedPrograms
from hvdtrain.launch.running.watchdog import Limits, Verdict, Watchdog
from hvdtrain.view.live_view import is_drawable

# No restart after these: usage errors, the user's own signals (also sent when the output has no reader any more), and
# a job that has no time left.
_FINAL = {
    0,
    EXIT_USAGE,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EXIT_SIGNAL_BASE + signal.SIGHUP,
    EXIT_PREEMPTED,
}
LOOK_SECONDS = 1.0
LEAST_FILES = 32
"""Minimum limit on open files. Two ranks start with a limit of 40, but not with 20."""
_WARNED = "\nSIGUSR1: this job will end soon; notifying all workers"


@dataclass(frozen=True)
class OutputOptions:
    """Which output of a run the user sees, and where the rest is kept.

    Attributes:
        log_dir: Folder for this run's files. None creates one under `.hvdtrain/logs`.
        all_ranks: Whether to show the output of all ranks.
        verbose: Whether to show the launcher's own output.
        timestamps: Whether to prefix each line of the ranks with the time.
        command: Command for `hvdtrain ps` to show, without secrets.
    """

    log_dir: Path | None = None
    all_ranks: bool = False
    verbose: bool = False
    timestamps: bool = False
    command: str = ""


@dataclass(frozen=True)
class RunLimits:
    """How long to wait for a run, and whether to restart it.

    Attributes:
        grace: Seconds for scripts that handle the signal that ends the run.
        limits: Limits of the watchdog. None disables it.
        restarts: Maximum number of restarts after failures, as long as each run made progress.
    """

    grace: float = 0.0
    limits: Limits | None = None
    restarts: int = 0


def run_launch(
    argv: Sequence[str],
    view: OutputOptions,
    patience: RunLimits,
    *,
    environ: Mapping[str, str] | None = None,
    elastic: bool = False,
    process_names: ProcessNames = RANKS,
    on_outcome: Callable[[Outcome, Path, signal.Signals | None], None] | None = None,
) -> int:
    """Run a launch command; show, save and interpret its output.

    Args:
        argv: Command to run.
        view: Which output the user sees.
        patience: Time limits and restarts.
        environ: Environment of the command. None uses that of this process.
        elastic: Whether the other ranks continue when one fails, so that the run may still succeed.
        process_names: Names of the processes.
        on_outcome: Function called with the outcome, the log folder, and the signal that the user sent. If given, the
            user gets no message.

    Returns:
        The exit code for the user.

    Raises:
        UsageError: The limits of this shell (ulimit) are too low, or the log folder cannot be used.
        CannotStart: The command does not exist or cannot be started.
    """
    _require_limits()
    environ = os.environ if environ is None else environ
    restarts = 0
    while True:
        code, progress = _run_once(
            argv, view, patience, environ, elastic, process_names, on_outcome
        )
        if code in _FINAL or not progress or restarts == patience.restarts:
            return code
        restarts += 1
        print(
            f"\nrestarting ({restarts} of {patience.restarts}): the run failed with exit code {code} "
            f"after {progress}",
            file=sys.stderr,
            flush=True,
        )


def _require_limits() -> None:
    """Check the resource limits: below them, programs fail without a message, or with a misleading one."""
    for kind, option, least, what in (
        (resource.RLIMIT_NOFILE, "-n", LEAST_FILES, "open files"),
        (resource.RLIMIT_FSIZE, "-f", 1, "blocks in a file"),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and soft < least:
            raise UsageError(
                f"this shell allows only {soft} {what} (ulimit {option}), too few for a launch: raise the "
                "limit (`hvdtrain doctor` suggests a value)"
            )


def _run_once(
    argv: Sequence[str],
    view: OutputOptions,
    patience: RunLimits,
    environ: Mapping[str, str],
    elastic: bool,
    process_names: ProcessNames,
    on_outcome: Callable[[Outcome, Path, signal.Signals | None], None] | None,
) -> tuple[int, str]:
    """Run the command once. Returns the exit code and a description of the progress, empty if there was none."""
    log_dir = make_log_dir(view.log_dir)
    terminals = () if view.all_ranks else _terminals()
    drawn = 1 in terminals and is_drawable()
    launch_id = uuid.uuid4().hex
    limits = patience.limits
    still = limits.still if limits else float("inf")
    environment = {
        **_window(terminals),
        **environ,
        LOG_DIR: str(log_dir.resolve()),
        TERMINAL: "".join(map(str, terminals)) + (DRAWN if drawn else "") or "0",
        STOPPED_SECONDS: str(still),
        HANG_TIMEOUT: str(limits.hang if limits else 0),
    }
    output = Output(
        log_dir,
        bytes_of(sys.stdout),
        bytes_of(sys.stderr),
        all_ranks=view.all_ranks,
        show_launcher=view.verbose,
        stamp=_time_of_day if view.timestamps else None,
        process_names=process_names,
        view=LiveRows(sys.stdout) if drawn else None,
    )
    run = _ShownRun(
        output,
        # Processes of other strategies may come and go; their launcher monitors them.
        Watchdog(limits if process_names == RANKS else None, still),
        StoppedPrograms(),
        process_names,
        elastic,
        RunStatus(launch_id, view.command),
        # Launchers of ranks report on them; other launches usually run their script on this host.
        None if process_names == RANKS else RankMonitor(launch_id),
    )
    output.on_news = run.take_news
    with output:
        run.write_status()
        ending = run_process(
            argv, run, output, environment=environment, launch_id=launch_id, grace=patience.grace
        )
        run.write_status()
        outcome = outcome_of(
            ending,
            [] if elastic and ending.returncode == 0 else output.failures,
            output.launcher_text.decode(errors="replace"),
            log_dir,
            process_names,
            hung=run.hung,
            absent=run.watchdog.absent({failure.rank for failure in output.failures}),
            missed_init=run.watchdog.missed_init(),
            started=bool(run.watchdog.statuses),
        )
        if on_outcome is not None:
            on_outcome(outcome, log_dir, None if output.unread else ending.received)
        elif outcome.message:
            output.say(outcome.message)
    return outcome.exit_code, run.watchdog.progress()


@dataclass
class _ShownRun:
    """A run whose output is shown and whose ranks are monitored.

    Attributes:
        monitor: Monitor of the scripts on this host. None if the launcher reports on its ranks.
        hung: Reason why the watchdog ended the run; empty if it did not.
        orders: Lines to send to the command.
    """

    output: Output
    watchdog: Watchdog
    stopped: StoppedPrograms
    process_names: ProcessNames
    elastic: bool
    status: RunStatus
    monitor: RankMonitor | None
    hung: str = ""
    looked: float = float("-inf")
    written: float = float("-inf")
    orders: bytes = b""

    def tick(self) -> None:
        # By the age of the status others see whether this run lasts, also one without any news.
        if time.monotonic() - self.written >= WRITE_SECONDS:
            self.write_status()

    def take_news(self, line: bytes) -> None:
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            news = json.loads(line)
            self.watchdog.hear(from_json(news.get("ranks", [])))
            if "host" in news:
                self.watchdog.hear_host(news["host"])
                self.stopped.hear(news["host"], news["stopped"])
            if "without" in news:
                self.watchdog.forget_host(news["without"])
                self.stopped.hear(news["without"], [])
            if "tasks" in news:
                self.watchdog.tasks.expect(news["tasks"], news["begin"])
            if "task" in news:
                self.watchdog.tasks.hear(news["task"], ended=news["ended"])
            if "left" in news:
                self.output.say(f"\nended processes that the script left running: {news['left']}")

    def write_status(self) -> None:
        """Write the status file for `hvdtrain ps`."""
        self.written = time.monotonic()
        self.status = self.status.with_ranks(list(self.watchdog.statuses.values()))
        self.status.write(self.output.log_dir)

    def stopping(self, received: signal.Signals) -> None:
        self.output.hurry()
        self.output.say(_stopping(received, self.output.unread, self.process_names))

    def warning(self) -> None:
        self.output.say(_WARNED)

    def has_failed(self) -> bool:
        return bool(self.output.failures) and not self.elastic

    def is_hung(self, command: int) -> bool:
        if self.monitor is not None and time.monotonic() - self.looked >= LOOK_SECONDS:
            self.looked = time.monotonic()
            self.watchdog.hear(self.monitor.look())
        if self.output.is_behind:
            return False  # The ranks may be blocked by a slow reader, like this run.
        if self.hung:
            return True
        verdict = self.watchdog.verdict(self.stopped.look([command]))
        if verdict.culprits and self.elastic and self.watchdog.can_replace(verdict.culprits):
            self._end_ranks(verdict)
        elif verdict:
            self.hung = verdict.text
            self.output.say(
                "\nthis run hangs: printing the stacks of its workers, then ending them"
            )
        return bool(self.hung)

    def _end_ranks(self, verdict: Verdict) -> None:
        """End the ranks that the others wait for; the launcher of an elastic job restarts them."""
        self.watchdog.dismiss(verdict.culprits)
        names = ranks_in_words([one.rank for one in verdict.culprits])
        self.output.say(f"\n{verdict.text}\nended, to be restarted: {names}")
        for one in verdict.culprits:
            self.orders += json.dumps({"end": one.pid, "host": one.host}).encode() + b"\n"

    def take_orders(self) -> bytes:
        orders, self.orders = self.orders, b""
        return orders


def _terminals() -> tuple[int, ...]:
    """Return the descriptors of this process's standard output and error that are terminals.

    A script may have replaced them by objects of its own, which print to the terminal or not.
    """
    return tuple(n for n, stream in ((1, sys.stdout), (2, sys.stderr)) if _is_terminal(stream))


def _is_terminal(stream: object) -> bool:
    return isinstance(stream, io.TextIOBase) and not stream.closed and stream.isatty()


def _window(terminals: Sequence[int]) -> dict[str, str]:
    """Return the terminal's size as variables for the ranks, whose pipes or pseudo-terminals have no size."""
    for descriptor in terminals:
        with suppress(OSError):
            size = os.get_terminal_size(descriptor)
            if size.columns and size.lines:
                return {"COLUMNS": str(size.columns), "LINES": str(size.lines)}
    return {}


def _time_of_day() -> bytes:
    return time.strftime("%Y-%m-%d %H:%M:%S ").encode()


def _stopping(received: signal.Signals, unread: bool, process_names: ProcessNames) -> str:
    why = "the output is no longer being read" if unread else received.name
    what = "all workers" if process_names == RANKS else "the run"
    return f"\n{why}: stopping {what} (repeat to stop at once)"
