"""Jobs that train in turns, with scripts that only count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.bench import turns
from hvdtrain.bench.turns import Turn, in_turns, take_turns
from hvdtrain.errors import EngineError, UsageError

SCRIPT = """
import json, os, sys, time
from pathlib import Path
from hvdtrain.bench.turns import Training, serve
log = Path(sys.argv[0]).with_name("log")
def write(*what):
    with log.open("a") as file:
        file.write(json.dumps(what) + "\\n")
def build(name, fails=""):
    rank = int(os.environ["RANK"])
    write(name, "pid", os.getpid())
    def step():
        write(name, "step", time.time())
        time.sleep(0.01)
        if fails == "in a step":
            sys.exit("no more steps")
        return 3.0
    if fails == "at first":
        sys.exit("cannot begin")
    told = [lambda what=what: write(name, what) for what in ("resume", "pause")]
    return Training(step, rank, 8, *told)
serve(build)
"""
EACH = "import os, subprocess, sys; jobs = [subprocess.Popen([sys.executable, *sys.argv[2:]], env=os.environ | {'RANK': str(r)}) for r in range(int(sys.argv[1]))]; sys.exit(max(job.wait() for job in jobs))"  # noqa: E501


def ranks(np: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-c", EACH, str(np), str(script), *arguments]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(turns, "SECONDS", 0.05)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def written(script: Path) -> list[Any]:
    return [json.loads(line) for line in script.with_name("log").read_text().splitlines()]


def test_the_rate() -> None:
    assert Turn((1.0, 3.0), examples=10).rate == 5


def test_one_trains_while_the_other_waits(script: Path) -> None:
    with in_turns() as start:
        one, two = (
            start(ranks, 1, script, {"name": "one"}),
            start(ranks, 2, script, {"name": "two"}),
        )
        script.with_name("log").unlink()
        found = [*take_turns(one), *take_turns(two), *take_turns(one)]
    for turn, job in zip(found, (one, two, one), strict=True):
        assert turn.examples == 8
        assert turn.loss == 3
        assert len(turn.seconds) == job.steps
        assert min(turn.seconds) >= 0.01
    log = written(script)
    order = [name for name, *what in log if what == ["resume"]]
    assert order == ["one", "two", "two", "one"]
    for name, count in (("one", 2 * one.steps + 4), ("two", 2 * (two.steps + 2))):
        assert sum(name == other and what == "step" for other, what, *_ in log) == count
    began = log.index(["two", "resume"])
    ended = len(log) - log[::-1].index(["two", "pause"])
    assert {name for name, *_ in log[began:ended]} == {"two"}, "the other one waits"
    assert log[began - 1] == ["one", "pause"]


def test_jobs_train_at_the_same_time(script: Path) -> None:
    with in_turns() as start:
        both = [start(ranks, 1, script, {"name": name}) for name in ("one", "two")]
        both[0].steps, both[1].steps = 200, 3
        script.with_name("log").unlink()
        one, two = take_turns(*both)
    assert len(one.seconds) == len(two.seconds) == 200, "as many, so that steps can be compared"
    times = {
        name: [at for other, what, *at in written(script) if (other, what) == (name, "step")]
        for name in ("one", "two")
    }
    assert times["one"][0] < times["two"][-1]
    assert times["two"][0] < times["one"][-1]


@pytest.mark.parametrize(
    ("fails", "said"), [("at first", "cannot begin"), ("in a step", "no more")]
)
def test_what_fails_is_an_error_with_its_words(script: Path, fails: str, said: str) -> None:
    with pytest.raises(EngineError, match=said), in_turns() as start:
        start(ranks, 1, script, {"name": "fine"})
        start(ranks, 2, script, {"name": "one", "fails": fails})


def pids(script: Path) -> list[int]:
    return [value for _, what, *values in written(script) if what == "pid" for value in values]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_is_killed_is_an_error(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_ENDING_SECONDS", 1)  # Its launcher does not end the other rank.
    with in_turns() as start:
        other = start(ranks, 1, script, {"name": "other"})
        job = start(ranks, 2, script, {"name": "one"})
        os.kill(pids(script)[-1], signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(EngineError, match="A process ended before"):
            take_turns(job)
        assert time.monotonic() - begin < 20
        assert take_turns(other)[0].loss == 3, "the others go on"


def test_what_hangs_is_an_error_and_is_ended(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_turns() as start:
        job = start(ranks, 2, script, {"name": "one"})
        job.steps = 10_000
        monkeypatch.setattr(turns, "TIMEOUT_SECONDS", 1)
        with pytest.raises(EngineError, match="took longer than 1 s"):
            take_turns(job)
        deadline = time.monotonic() + 20
        while any(map(is_running, pids(script))):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_nothing_is_left_when_the_measuring_process_is_killed(script: Path, tmp_path: Path) -> None:
    measuring = tmp_path / "measuring.py"
    measuring.write_text(
        "import sys, time; from pathlib import Path; import test_bench_turns as t\n"
        "t.turns.SECONDS = 0.05\n"
        f"with t.in_turns() as start:\n    start(t.ranks, 2, Path({str(script)!r}), {{'name': 'one'}})\n"
        "    print('started', flush=True); time.sleep(600)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, str(measuring)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
    ) as job:
        assert job.stdout is not None
        try:
            assert job.stdout.readline() == b"started\n"
        finally:
            job.kill()
    deadline = time.monotonic() + 20
    while any(map(is_running, pids(script))):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_folder_with_too_long_a_path_is_an_error(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(turns.tempfile, "tempdir", str(deep))
    with pytest.raises(UsageError, match="TMPDIR"), in_turns() as start:
        start(ranks, 1, script, {"name": "one"})
