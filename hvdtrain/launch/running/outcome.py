"""Determine why a run failed, and report the first cause once."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.environment import EXIT_FAILURE, EXIT_HANG, EXIT_PREEMPTED, EXIT_SIGNAL_BASE
from hvdtrain.launch.running.command_runner import Ending
from hvdtrain.launch.running.process_names import RANKS, ProcessNames, ranks_in_words
from hvdtrain.launch.ssh import ssh_error_in
from hvdtrain.signals import shell_code
from hvdtrain.worker.failure_report import Failure

# Messages of the launchers about the rank that ended first: mpirun (by a signal; with an exit code),
# horovodrun over Gloo, srun.
_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_MPI_EXIT = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(\d+)")
_MPI_LEFT = re.compile(r"process rank (\d+) with PID \d+ on\s+node \S+ exiting improperly")
_MPI_LOST = re.compile(
    r"lost communication with a remote daemon.*?Remote daemon: +\S+ on node (\S+)", re.DOTALL
)
_MPI_NOT_STARTED = "unable to reliably start one or more daemons"
_GLOO_EXIT = re.compile(r"Process (\d+) exit with status code (\d+)")
_SRUN_EXIT = re.compile(
    r"srun: error: \S+: tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|(Killed|Out Of Memory))"
)
# Messages of the programs of hvdtrain.start themselves, about hosts and servers, in whole sentences.
_STARTER = re.compile(r"^hvdtrain: (.*)$", re.MULTILINE)
_TAIL_LINES = 20
_SILENT = (
    "no reason is known; mpirun ends like this when it receives a signal (kill, a closed terminal)"
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: Exit code of `hvdtrain run`.
        message: Final message to the user, or empty.
        rank: Rank that failed first, or None if unknown.
        traceback: Traceback or message of that rank.
    """

    exit_code: int
    message: str
    rank: int | None = None
    traceback: str = ""


def outcome_of(
    ending: Ending,
    failures: list[Failure],
    launcher_text: str,
    log_dir: Path,
    process_names: ProcessNames = RANKS,
    *,
    hung: str = "",
    absent: str = "",
    missed_init: str = "",
    started: bool = False,
) -> Outcome:
    """Determine the outcome of a run.

    Args:
        ending: How the launch command ended.
        failures: Failures reported by the ranks, in order of arrival.
        launcher_text: Output of horovodrun, mpirun or srun.
        log_dir: Log folder to name in the message.
        process_names: Names of the ranks.
        hung: Reason why the watchdog ended the run, or empty.
        absent: Which ranks the others waited for, or empty if unknown.
        missed_init: Which ranks did not call init while others waited for them there, or empty.
        started: Whether any rank started.
    """
    logs = f"logs{' of all workers' if process_names == RANKS else ''}: {log_dir}"
    if ending.received is not None:
        saved = next((one for one in failures if one.exit_code == EXIT_PREEMPTED), None)
        if saved is None:
            return Outcome(EXIT_SIGNAL_BASE + ending.received, "")
        message = f"{_describe(saved, failures, process_names)}\n{logs}"
        return Outcome(EXIT_PREEMPTED, message, saved.rank, saved.text)
    if hung:
        return Outcome(EXIT_HANG, f"{hung}\nlogs of all workers, with their stacks: {log_dir}")
    if ending.returncode == 0 and not failures:
        return Outcome(0, "")
    alone = not ending.ended and all(one.secondary for one in failures)
    if ending.returncode < 0 and process_names == RANKS and (alone or not failures):
        code = _code_of(ending)
        return Outcome(code, f"{process_names.starter} {how_it_ended(code)}\n{logs}")
    ended = _ended_first(launcher_text)
    cause = _root_cause(failures, ended)
    told = "\n".join(dict.fromkeys(_STARTER.findall(launcher_text)))
    # A failed worker or server explains the failure of the others, whatever the chief itself reports.
    if told and (cause is None or cause.secondary or _was_killed(cause) or process_names.roles):
        has_logs = failures or ended or process_names.roles
        return Outcome(_code_of(ending), f"{told}\n{logs}" if has_logs else told)
    if cause is not None:
        missed = _result_of(
            absent if cause.secondary else missed_init if _aborted(cause.exit_code) else ""
        )
        message = f"{missed}{_describe(cause, failures, process_names)}\n{logs}"
        return Outcome(cause.exit_code, message, cause.rank, cause.text)
    if match := _MPI_LEFT.search(launcher_text):
        left = f"rank {match[1]} exited before the end of the script (os._exit?) while others needed it"
        return Outcome(EXIT_FAILURE, f"{left}\n{logs}", int(match[1]))
    if ended is not None:
        rank, code = ended
        missed = _result_of(missed_init if _aborted(code) else "")
        return Outcome(code, f"{missed}rank {rank} {how_it_ended(code)}\n{logs}", rank)
    if match := _MPI_LOST.search(launcher_text):
        lost = f"host {match[1]} was lost: its orted was killed, or the connection to it was lost"
        return Outcome(EXIT_FAILURE, f"{lost}\n{logs}")
    code = _code_of(ending)
    if process_names != RANKS and not launcher_text.strip():
        return Outcome(code, f"{_only(process_names)} {how_it_ended(code)}\n{logs}")
    if broken := ssh_error_in(launcher_text):
        return Outcome(code, f"{broken}\n{logs}")
    if _MPI_NOT_STARTED in launcher_text:
        # mpirun prints this whenever the ssh of a daemon ends.
        orted = "mpirun's daemon (orted) on another host"
        what = "did not start: is the same Open MPI installed there?"
        what = "was killed, or the connection to it was lost" if started else what
        return Outcome(EXIT_FAILURE, f"{orted} {what}\n{logs}")
    tail = "\n".join(launcher_text.strip().splitlines()[-_TAIL_LINES:])
    launcher = process_names.starter if process_names == RANKS else "the launcher"
    launcher = "srun" if tail.startswith("srun: ") else launcher
    # A launcher also exits with the code of a killed rank; only a signal shows that it was killed itself.
    own_signal = ending.returncode < 0 or (not tail and code > EXIT_SIGNAL_BASE)
    ended_so = how_it_ended(code) if own_signal else f"failed (exit code {code})"
    said = (
        f":\n{tail}"
        if tail
        else f": {_SILENT}"
        if process_names == RANKS and not own_signal
        else ""
    )
    return Outcome(code, f"{launcher} {ended_so}{said}\n{logs}")


def _code_of(ending: Ending) -> int:
    """Return the exit code as a shell reports it, or 1 for a command that claims success."""
    return shell_code(ending.returncode) or EXIT_FAILURE


def _root_cause(failures: list[Failure], ended: tuple[int, int] | None) -> Failure | None:
    """Return the first failure that does more than report that another rank is gone.

    A killed rank reports nothing. If all reports are secondary, the launcher's message about a killed
    rank takes precedence.
    """
    primary = [failure for failure in failures if not failure.secondary]
    if primary:
        return primary[0]
    if ended is not None and ended[1] > EXIT_SIGNAL_BASE:
        return None
    return failures[0] if failures else None


def _was_killed(failure: Failure) -> bool:
    """Return whether a signal ended the rank before it could report anything itself."""
    return failure.exit_code - EXIT_SIGNAL_BASE in signal.valid_signals() and not failure.text


def _aborted(code: int) -> bool:
    """Return whether the rank was aborted, as Gloo does after waiting in vain for another rank to call init."""
    return code == EXIT_SIGNAL_BASE + signal.SIGABRT


def _result_of(reason: str) -> str:
    return f"{reason}\nas a result, " if reason else ""


def _only(process_names: ProcessNames) -> str:
    """Return the name of the process whose exit code is the launch's."""
    return process_names.name(0) if process_names.roles else "the script"


def _describe(cause: Failure, failures: list[Failure], process_names: ProcessNames) -> str:
    same = cause.text, cause.exit_code
    alike = {one.rank for one in failures if (one.text, one.exit_code) == same}
    if process_names != RANKS:
        name = _only(process_names)
    elif len(alike) == cause.size > 1:
        name = f"each of the {cause.size} ranks"
    else:
        others = sorted(alike - {cause.rank})
        name = f"rank {cause.rank}" + (f" (and {ranks_in_words(others)})" if others else "")
    if not cause.text:
        return f"{name} {how_it_ended(cause.exit_code)}"
    if cause.exit_code == EXIT_PREEMPTED:
        return cause.text
    one_line = "\n" not in cause.text
    return f"{name} failed:{' ' if one_line else chr(10)}{cause.text}"


def how_it_ended(code: int) -> str:
    """Describe how a process ended, from its exit code as a shell reports it."""
    if code > EXIT_SIGNAL_BASE:
        try:
            name = signal.Signals(code - EXIT_SIGNAL_BASE).name
        except ValueError:
            return f"ended with exit code {code}"
        if name == "SIGSTOP":
            return "was stopped (SIGSTOP) and not resumed, so it was killed"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code}"


def _ended_first(launcher_text: str) -> tuple[int, int] | None:
    """Return (rank, exit code) of the rank that the launcher saw end first."""
    if match := _KILLED.search(launcher_text):
        return int(match[1]), EXIT_SIGNAL_BASE + int(match[2])
    if match := _MPI_EXIT.search(launcher_text) or _GLOO_EXIT.search(launcher_text):
        return int(match[1]), int(match[2]) or EXIT_FAILURE
    if match := _SRUN_EXIT.search(launcher_text):
        return int(match[1]), int(match[2] or EXIT_SIGNAL_BASE + signal.SIGKILL)
    return None
