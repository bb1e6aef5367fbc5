"""The first cause of a failed run, and the exit code that tells it."""

import signal
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.environment import EXIT_PREEMPTED
from hvdtrain.launch.running.command_runner import Ending
from hvdtrain.launch.running.outcome import Outcome, outcome_of
from hvdtrain.launch.running.process_names import ALONE, ProcessNames
from hvdtrain.worker.failure_report import Failure, from_line, is_secondary

LOGS = "\nlogs of all workers: logs"
KILLED = "mpirun noticed that process rank 1 with PID 0 on node n exited on signal 9 (Killed)."
LOST = Failure(0, 1, True, "HorovodInternalError: Horovod has been shut down")
BUG = Failure(1, 1, False, "Traceback:\nValueError: x")

ROLES = ProcessNames(("chief", "worker-0", "ps-0"))


def judge(code: int, *failures: Failure, launcher: str = "", **known: Any) -> Outcome:
    return outcome_of(Ending(code, None), list(failures), launcher, Path("logs"), **known)


def test_success_says_nothing() -> None:
    assert judge(0) == Outcome(0, "")


def test_the_first_cause_not_its_consequences() -> None:
    assert judge(1, LOST, BUG) == Outcome(
        1, "rank 1 failed:\nTraceback:\nValueError: x" + LOGS, BUG.rank, BUG.text
    )


def test_the_same_error_of_many_ranks_is_said_once() -> None:
    alike = [Failure(rank, 2, False, "wrong data") for rank in (2, 0, 1)]
    assert judge(1, *alike) == Outcome(
        2, "rank 2 (and ranks 0, 1) failed: wrong data" + LOGS, 2, "wrong data"
    )


def test_the_same_end_of_all_ranks() -> None:
    ended = [Failure(rank, 3, False, "", 2) for rank in (1, 0)]
    assert judge(1, *ended).message == "each of the 2 ranks ended with exit code 3" + LOGS
    other = [ended[0], Failure(0, 4, False, "", 2)]
    assert judge(1, *other).message == "rank 1 ended with exit code 3" + LOGS


def test_only_consequences_are_better_than_nothing() -> None:
    assert judge(1, LOST).message.startswith("rank 0 failed: HorovodInternalError")


@pytest.mark.parametrize(
    ("code", "launcher", "expected"),
    [
        (137, KILLED, Outcome(137, "rank 1 was killed by SIGKILL (out of memory?)" + LOGS, 1)),
        (
            1,
            "Process 1 exit with status code 139.\nTerminating remaining workers",
            Outcome(139, "rank 1 was killed by SIGSEGV" + LOGS, 1),
        ),
        (
            7,
            "  Process name: [[8388,1],1]\n  Exit code:    7\n",
            Outcome(7, "rank 1 ended with exit code 7" + LOGS, 1),
        ),
        (
            3,
            "srun: error: n1: task 1: Exited with exit code 3\nsrun: error: n2: tasks 2-3: Killed\n",
            Outcome(3, "rank 1 ended with exit code 3" + LOGS, 1),
        ),
        (
            137,
            "srun: error: n2: tasks 2-3: Out Of Memory\n",
            Outcome(137, "rank 2 was killed by SIGKILL (out of memory?)" + LOGS, 2),
        ),
        (
            1,
            "srun: error: Unable to create step for job 11: More processors requested\n",
            Outcome(
                1,
                "srun failed (exit code 1):\nsrun: error: Unable to create step for job 11: "
                "More processors requested" + LOGS,
            ),
        ),
        (
            1,
            "could not connect to some hosts via ssh",
            Outcome(
                1,
                "horovodrun failed (exit code 1):\ncould not connect to some hosts via ssh" + LOGS,
            ),
        ),
    ],
)
def test_what_only_the_launcher_saw(code: int, launcher: str, expected: Outcome) -> None:
    assert judge(code, launcher=launcher) == expected


def test_an_ssh_error_is_named_not_what_mpirun_says_about_it() -> None:
    """As ssh and Open MPI 4.1.8 print it where a host was installed anew."""
    at = "@" * 59
    prose = "\n".join(f"* reason {number} that mpirun thinks of" for number in range(30))
    said = (
        f"{at}\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n{at}\n"
        "IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\n"
        "Host key for node2 has changed and you have requested strict checking.\n"
        f"Host key verification failed.\nORTE was unable to reliably start daemons:\n{prose}\n"
    )
    found = judge(1, launcher=said)
    assert found.exit_code == 1
    assert found.message.startswith(
        "host node2: its host key has changed (Host key for node2 has changed"
    )
    assert "ssh-keygen -R node2" in found.message
    assert "mpirun thinks" not in found.message


def test_what_the_starter_says_of_other_hosts() -> None:
    said = "noise\nhvdtrain: host b: it cannot be reached\nhvdtrain: host c: no Python\n"
    assert judge(1, launcher=said) == Outcome(1, "host b: it cannot be reached\nhost c: no Python")
    lost = "hvdtrain: the connection to host b was lost\nProcess 1 exit with status code 255.\n"
    expected = Outcome(1, "the connection to host b was lost" + LOGS)
    assert judge(1, launcher=lost) == expected
    assert judge(1, LOST, launcher=lost) == expected
    assert judge(-15, LOST, launcher=lost).exit_code == 143
    assert judge(1, BUG, launcher=lost).message.startswith("rank 1 failed:")


def test_a_killed_rank_counts_more_than_those_it_left() -> None:
    assert judge(137, LOST, launcher=KILLED).exit_code == 137


def test_a_killed_launcher_counts_more_than_the_ranks_that_it_took_along() -> None:
    taken = "Process 1 exit with status code 143.\n"
    assert judge(-9, launcher=taken) == Outcome(
        137, "horovodrun was killed by SIGKILL (out of memory?)" + LOGS
    )
    assert judge(-15, BUG).message.startswith("rank 1 failed:")
    assert judge(-9, LOST, launcher=taken).message.startswith("horovodrun was killed by SIGKILL")
    ended = outcome_of(Ending(-9, None, ended=True), [LOST], "", Path("logs"))
    assert ended.message.startswith("rank 0 failed: HorovodInternalError"), (
        "and did not end in time"
    )


def test_what_mpirun_guesses_of_a_daemon_that_did_not_start_is_not_shown() -> None:
    prose = "".join(f"* reason {number}\n" for number in range(30))
    said = f"ORTE was unable to reliably start one or more daemons.\nThis usually is caused by:\n{prose}"
    found = judge(255, launcher=said)
    assert found.exit_code == 1
    assert found.message.startswith("mpirun's daemon (orted) on another host did not start: is")
    assert "reason" not in found.message
    killed = judge(255, launcher=said, started=True).message
    assert (
        killed
        == f"mpirun's daemon (orted) on another host was killed, or the connection to it was lost{LOGS}"
    )


def test_mpirun_does_not_tell_that_it_was_sent_a_signal() -> None:
    assert "mpirun ends like this when it receives a signal" in judge(1).message


def test_bare_exit_codes() -> None:
    assert judge(1, Failure(1, 3, False, "")) == Outcome(
        3, "rank 1 ended with exit code 3" + LOGS, 1
    )


def test_a_rank_that_waited_for_another_one_to_call_init() -> None:
    """Gloo aborts it, which is no cause."""
    missed = "rank 1 is missing"
    for found in (
        judge(1, Failure(0, 134, False, ""), missed_init=missed),
        judge(1, launcher="Process 0 exit with status code 134.", missed_init=missed),
    ):
        assert found.exit_code == 134
        assert found.message == f"{missed}\nas a result, rank 0 was killed by SIGABRT{LOGS}"
    killed = judge(1, Failure(0, 137, False, ""), missed_init=missed)
    assert missed not in killed.message


def test_the_exit_code_255_is_no_signal() -> None:
    """mpirun may crash after a rank on another host has ended so."""
    crashed = "hvdtrain: mpirun (process 5), which starts the ranks and waits for them, was killed by SIGSEGV\n"
    found = judge(139, Failure(1, 255, False, ""), launcher=crashed)
    assert found == Outcome(255, "rank 1 ended with exit code 255" + LOGS, 1)
    killed = judge(139, Failure(1, 137, False, ""), launcher=crashed)
    assert "was killed by SIGSEGV" in killed.message


def test_signals_of_the_user() -> None:
    for number, code in [(signal.SIGINT, 130), (signal.SIGTERM, 143)]:
        assert outcome_of(Ending(1, number), [BUG], "", Path("logs")) == Outcome(code, "")
    saved = Failure(0, EXIT_PREEMPTED, False, "stopped after 20 steps")
    found = outcome_of(Ending(1, signal.SIGTERM), [BUG, saved], "", Path("logs"))
    assert found == Outcome(75, f"{saved.text}{LOGS}", 0, saved.text)


def test_failures_travel_as_one_line() -> None:
    line = BUG.to_line()
    assert "\n" not in line
    assert from_line(line) == BUG
    assert from_line("Traceback (most recent call last):") is None
    assert from_line(line[:-1]) is None


def test_secondary_errors() -> None:
    class HorovodInternalError(RuntimeError):
        pass

    assert is_secondary(HorovodInternalError("x"))
    assert is_secondary(RuntimeError("... Connection reset by peer"))
    assert is_secondary(ValueError("Horovod has not been initialized properly; use hvd.init()."))
    assert not is_secondary(ValueError("x"))
    try:
        try:
            raise HorovodInternalError("gone")
        except RuntimeError as error:
            raise ValueError("no batch") from error
    except ValueError as wrapped:
        assert is_secondary(wrapped)


@pytest.mark.parametrize(
    ("process_names", "code", "failures", "launcher", "expected"),
    [
        (ALONE, 1, [Failure(0, 1, False, "no data")], "", (1, "the script failed: no data")),
        (ALONE, 7, [], "", (7, "the script ended with exit code 7")),
        (ALONE, -9, [], "", (137, "the script was killed by SIGKILL (out of memory?)")),
        (ROLES, 3, [Failure(0, 3, False, "")], "", (3, "chief ended with exit code 3")),
        (ROLES, 137, [], "", (137, "chief was killed by SIGKILL (out of memory?)")),
        # A server's end is why the chief failed, whatever the chief says.
        (ROLES, 1, [Failure(0, 9, False, "lost")], "hvdtrain: ps-0 died\n", (1, "ps-0 died")),
        (ROLES, 1, [], "usage: x\nerror: y\n", (1, "the launcher failed (exit code 1):\nusage: x\nerror: y")),
    ],
)  # fmt: skip
def test_processes_that_are_no_ranks(
    process_names: ProcessNames,
    code: int,
    failures: list[Failure],
    launcher: str,
    expected: tuple[int, str],
) -> None:
    found = outcome_of(Ending(code, None), failures, launcher, Path("logs"), process_names)
    assert (found.exit_code, found.message) == (expected[0], expected[1] + "\nlogs: logs")


def test_a_launcher_that_is_killed_is_said_to_be(tmp_path: Path) -> None:
    for returncode in (-9, 137):
        outcome = outcome_of(Ending(returncode, None), [], "", tmp_path)
        assert outcome.exit_code == 137
        assert outcome.message == (
            f"horovodrun was killed by SIGKILL (out of memory?)\nlogs of all workers: {tmp_path}"
        )


def test_a_daemon_of_mpirun_that_was_killed() -> None:
    text = (
        "ORTE has lost communication with a remote daemon.\n\n"
        "  HNP daemon   : [[19433,0],0] on node node1\n"
        "  Remote daemon: [[19433,0],1] on node node2\n\nThis is usually due to either a failure\n"
    )
    said = "host node2 was lost: its orted was killed, or the connection to it was lost"
    assert judge(205, launcher=text) == Outcome(1, said + LOGS)
