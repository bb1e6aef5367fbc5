"""How `hvdtrain submit` follows a job, and reads from Slurm how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_stand_in import play

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.slurm.job_queue import follow_job, read_states, submit_job

SHOWN = (
    "JobId=7 JobName=a b UserId=root(0) JobState={state} Reason={reason} Requeue=1 Restarts={restarts} "
    "ExitCode={code} Command=/x y/t.sh StdErr=/x y/out.7 StdOut=/x y/out.7 Power= \n"
)


def shown(state: str, code: str = "0:0", reason: str = "None", restarts: int = 0) -> str:
    return SHOWN.format(state=state, code=code, reason=reason, restarts=restarts)


@pytest.mark.parametrize(
    ("state", "code", "result"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "3:0", 3),
        ("CANCELLED", "0:15", 143),
        ("TIMEOUT", "0:0", 1),
        ("OUT_OF_MEMORY", "0:125", 253),
    ],
)
def test_how_jobs_end(state: str, code: str, result: int) -> None:
    (job,) = read_states(shown(state, code))
    assert (job.name, job.state, job.result) == ("7", state, result)
    assert job.output == Path("/x y/out.7")


def test_the_tasks_of_an_array() -> None:
    text = (
        "JobId=9 ArrayJobId=7 ArrayTaskId=0 JobState=RUNNING\n"
        "JobId=7 ArrayJobId=7 ArrayTaskId=1-3 JobState=PENDING\n"
    )
    assert [job.name for job in read_states(text)] == ["7_0", "7_1-3"]
    assert read_states("slurm_load_jobs error: Invalid job id specified\n") == []


def test_a_job_is_followed_over_its_restart(
    slurm: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = slurm / "out.7"
    steps = [
        shown("PENDING", reason="Resources"),
        shown("RUNNING"),
        shown("PREEMPTED", "0:15"),
        shown("PENDING", reason="BeginTime", restarts=1),
        shown("RUNNING", restarts=1),
        *[shown("FAILED", "3:0", restarts=1)] * 2,
    ]
    for number, step in enumerate(steps):
        (slurm / f"step{number}").write_text(step.replace("/x y/out.7", str(output)))
    play(
        slurm,
        "scontrol",
        f"cd {slurm}; n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) >n\n"
        f"[ $n = 1 ] && echo first >>{output}; [ $n = 4 ] && printf 'sec\\xff' >>{output}\ncat step$n",
    )
    said: list[str] = []
    with (slurm / "shown").open("wb") as target:
        assert follow_job("7", target, said.append) == 3
    assert (slurm / "shown").read_bytes() == b"first\nsec\xff"
    assert said == [
        "job 7: pending (Resources)",
        "job 7: running",
        "job 7: preempted, exit code 143",
        "job 7: pending (BeginTime), restart 1",
        "job 7: running, restart 1",
        "job 7: failed, exit code 3, restart 1",
    ]


def test_slurm_that_does_not_answer(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.launch.slurm.job_queue.SILENCE_SECONDS", 0.05)
    play(slurm, "scontrol", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    with pytest.raises(HvdtrainError, match=r"no longer reports on job 7.*: slurm_load_jobs"):
        follow_job("7", None, print)  # type: ignore[arg-type]


def test_the_number_of_a_job(slurm: Path) -> None:
    play(slurm, "sbatch", "echo '12;cluster2'")
    assert submit_job(Path("x.sbatch")) == "12"
