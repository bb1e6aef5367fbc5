"""What a status file may hold, and which process `hvdtrain stop` takes for a run's."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from hvdtrain.cli import logs as logs_module
from hvdtrain.cli import ps as ps_module
from hvdtrain.cli import stop as stop_module
from hvdtrain.cli.logs import logs
from hvdtrain.cli.ps import ps
from hvdtrain.cli.stop import stop
from hvdtrain.errors import UsageError
from hvdtrain.launch import running_jobs
from hvdtrain.launch.running.run_status import NAME, RunStatus, read_status
from hvdtrain.launch.running_jobs import CLOCK_SECONDS, Job, _is_launcher


def test_what_was_written_is_read(tmp_path: Path) -> None:
    status = RunStatus("id", "hvdtrain run train.py")
    status.write(tmp_path)
    assert read_status(tmp_path) == status
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", "[" * 100_000, json.dumps({"run": "a"}),
        *(json.dumps({**asdict(RunStatus("a", "b")), **change}) for change in (
            {"run": 1}, {"started": "x"}, {"pid": None}, {"pid": True}, {"more": 1}, {"command": ["x"]},
        )),
        '{"run": "' + "a" * 2_000_000 + '"}',
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_anything_else_is_no_status(tmp_path: Path, content: str) -> None:
    (tmp_path / NAME).write_text(content)
    assert read_status(tmp_path) is None
    assert read_status(tmp_path / "missing") is None


def test_only_the_runs_own_launcher_is_told_to_end() -> None:
    own = RunStatus("a", "b", started=time.time())
    assert _is_launcher(own)
    changes: list[dict[str, Any]] = [
        {"host": "another"},
        {"pid": -1},
        {"pid": 0},
        {"pid": 2**22 + 1},
        {"started": 1.0},
    ]
    for change in changes:
        assert not _is_launcher(replace(own, **change)), change


def test_a_launcher_that_is_first_looked_at_later_is_found() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        own = RunStatus("a", "b", pid=process.pid, started=time.time())
        time.sleep(CLOCK_SECONDS + 0.5)  # Only now does the kernel make its folder in /proc.
        assert _is_launcher(own)
    finally:
        process.kill()
        process.wait()


def test_a_container_has_the_status_of_the_run_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of three runs in its folder: one of another host, one from before, and its own."""
    began = datetime.datetime.fromisoformat("2026-01-31T12:00:00+00:00").timestamp()
    for name, host, after in (("1", "c1", -9.0), ("2", "c1", 1.0), ("3", "c2", 2.0)):
        (tmp_path / running_jobs.LOGS / name).mkdir(parents=True)
        RunStatus(name, "train.py", host=host, started=began + after, step=4).write(
            tmp_path / running_jobs.LOGS / name
        )
    about = {
        "Config": {"Cmd": ["train.py"], "Hostname": "c1", "WorkingDir": str(tmp_path)},
        "State": {"StartedAt": "2026-01-31T12:00:00.123Z"},
    }

    def ask(argv: list[str]) -> Any:
        return SimpleNamespace(
            answer=json.dumps([about]) if argv[1] == "inspect" else "0123456789ab\n"
        )

    monkeypatch.setattr(running_jobs, "ask", ask)
    (job,) = running_jobs._containers()
    assert job.name == "0123456789ab" and job.log_dir == tmp_path / running_jobs.LOGS / "2"
    assert job.status is not None and (job.status.run, job.status.step) == ("2", 4)
    about["Config"]["WorkingDir"] = "/nowhere"
    (job,) = running_jobs._containers()
    assert (job.status, job.log_dir) == (None, None)


def test_jobs_of_other_users_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = "JobId={} JobName=a UserId={} GroupId={} JobState=RUNNING Command=/w/.hvdtrain/jobs/t.sh StdOut=/w/out"
    own, other = f"me({os.getuid()})", f"other({os.getuid() + 1})"
    lines = "\n".join([job.format(7, own, other), job.format(8, other, own)])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(running_jobs, "ask", lambda command: SimpleNamespace(answer=lines))
    assert [job.name for job in running_jobs._slurm_jobs()] == ["7"]


def test_a_requeued_job_and_the_tasks_of_an_array_have_their_own_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Slurm requeues a job under the same ID, by itself as well if its node fails."""
    began = time.time() - 100
    runs = {"1": ("7", -900.0), "2": ("8", 1.0), "3": ("9", 1.0)}
    for name, (number, after) in runs.items():
        folder = tmp_path / running_jobs.LOGS / name
        folder.mkdir(parents=True)
        RunStatus(name, "train.py", slurm_job=number, started=began + after).write(folder)
    job = (
        f"UserId=me({os.getuid()}) JobState={{}} Restarts=1 Command=/w/.hvdtrain/jobs/t.sh "
        f"WorkDir={tmp_path} StdOut=/w/out StartTime={{}}"
    )
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(began))
    lines = [
        f"JobId=7 {job.format('RUNNING', start)}",
        f"JobId=7 {job.format('PENDING', 'Unknown')}",
        *(
            f"JobId={number} ArrayJobId=9 ArrayTaskId={task} {job.format('RUNNING', start)}"
            for number, task in ((8, 0), (9, 1))
        ),
    ]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    answer = SimpleNamespace(answer="\n".join(lines))
    monkeypatch.setattr(running_jobs, "ask", lambda command: answer)
    found = [
        (job.name, job.state, job.status and job.status.run, job.log_dir and job.log_dir.name)
        for job in running_jobs._slurm_jobs()
    ]
    assert found == [
        ("7", "running", None, None),
        ("7", "pending", None, "1"),
        ("9_0", "running", "2", "2"),
        ("9_1", "running", "3", "3"),
    ]


def test_logs_of_a_container_and_of_a_batch_job_are_followed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    container = Job("c1", "container", "running", "", 1.0, (), show=("echo", "logs", "c1"))
    batch = Job("7", "slurm", "running", "", 1.0, (), show=("echo", "cat"))
    monkeypatch.setattr(logs_module, "find_jobs", lambda: [container, batch])
    monkeypatch.setattr(logs_module, "follow_job", lambda name, *_: print(f"following {name}") or 3)
    assert CliRunner().invoke(logs, ["c1"]).exit_code == 0
    assert CliRunner().invoke(logs, ["c1", "--follow"]).exit_code == 0
    assert capfd.readouterr().out == "logs c1\nlogs --follow c1\n"
    followed = CliRunner().invoke(logs, ["7", "-f"])
    assert (followed.exit_code, followed.stdout) == (3, "following 7\n")


def test_a_rank_that_has_written_nothing_yet_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    nothing = CliRunner().invoke(logs, [str(tmp_path)])
    assert (nothing.exit_code, nothing.output) == (0, "rank 0 has written nothing to stdout\n")
    unknown = CliRunner().invoke(logs, [str(tmp_path), "--rank", "7"])
    assert isinstance(unknown.exception, UsageError)
    assert "--rank 7: no such rank in" in str(unknown.exception)


def test_logs_are_of_the_run_that_was_started_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of an earlier one that still writes its status; and what is named wrongly is answered by all there is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs_module, "find_jobs", list)
    for name, started in (("new", 2e9), ("old", 1e9)):
        folder = tmp_path / ".hvdtrain/logs" / name
        (folder / "rank.0").mkdir(parents=True)
        (folder / "rank.0" / "stdout").write_text(f"{name}\n")
        RunStatus("id", "train.py", started=started).write(folder)
    assert CliRunner().invoke(logs, []).stdout == "new\n"
    told = str(CliRunner().invoke(logs, ["zzz"]).exception)
    assert told == "zzz: no such job; running: none; latest in .hvdtrain/logs: old, new"


def test_stop_without_a_job_names_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("ab12", "run", "running", "train.py", 3.0, ("false",))
    monkeypatch.setattr(stop_module, "find_jobs", lambda: [job])
    told = CliRunner().invoke(stop, []).exception
    assert isinstance(told, UsageError)
    assert str(told) == "which one? hvdtrain stop JOB; running: ab12"


def test_no_command_moves_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("a", "run", "running", "train\x1b[2J\n.py é", 3.0, ("kill", str(os.getpid())))
    monkeypatch.setattr(ps_module, "find_jobs", lambda: [job])
    shown = CliRunner().invoke(ps, []).stdout
    assert shown.splitlines()[1].endswith("train\\x1b[2J\\n.py é")
    assert len(shown.splitlines()) == 2
