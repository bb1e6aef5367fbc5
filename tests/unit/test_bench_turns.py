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
from hvdtrain.errors import EngineError

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
        for job in both:
            job.steps = 40
        script.with_name("log").unlink()
        take_turns(*both)
    steps = [name for name, what, *_ in written(script) if what == "step"]
    assert "two" in steps[: steps.index("one") + 40]
    assert "one" in steps[: steps.index("two") + 40]


@pytest.mark.parametrize(
    ("fails", "said"), [("at first", "cannot begin"), ("in a step", "no more")]
)
def test_what_fails_is_an_error_with_its_words(script: Path, fails: str, said: str) -> None:
    with pytest.raises(EngineError, match=said), in_turns() as start:
        start(ranks, 1, script, {"name": "fine"})
        start(ranks, 2, script, {"name": "one", "fails": fails})


def test_a_rank_that_is_killed_is_an_error(script: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(EngineError, match="failed"), in_turns() as start:
        job = start(
            lambda np, script, words: [sys.executable, str(script), *words],
            1,
            script,
            {"name": "one"},
            {"RANK": "0"},
        )
        (pid,) = subprocess.run(
            ["pgrep", "-f", str(script)], capture_output=True, text=True
        ).stdout.split()
        os.kill(int(pid), signal.SIGKILL)
        take_turns(job)
    assert time.monotonic() - begin < 20


def test_what_hangs_is_an_error(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TIMEOUT_SECONDS", 6)
    with pytest.raises(EngineError, match="took longer than 6 s"), in_turns() as start:
        job = start(ranks, 2, script, {"name": "one"})
        job.steps = 10_000
        take_turns(job)


def test_nothing_is_left_when_the_measuring_process_is_killed(script: Path, tmp_path: Path) -> None:
    measuring = tmp_path / "measuring.py"
    measuring.write_text(
        "import sys, time; from pathlib import Path; import test_bench_turns as t\n"
        "t.turns.SECONDS = 0.05\n"
        f"with t.in_turns() as start:\n    start(t.ranks, 2, Path({str(script)!r}), {{'name': 'one'}})\n"
        "    print('started', flush=True); time.sleep(600)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    job = subprocess.Popen(
        [sys.executable, str(measuring)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == b"started\n"
    job.kill()
    job.wait()
    deadline = time.monotonic() + 20
    while subprocess.run(["pgrep", "-f", str(script)], capture_output=True).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
