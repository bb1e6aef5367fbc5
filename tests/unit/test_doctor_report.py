"""How `hvdtrain doctor` runs its checks, and how it shows what they found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from click.testing import Result as Called
from fake_programs import path_with

from hvdtrain.cli import doctor as command
from hvdtrain.cli.command_table import main
from hvdtrain.doctor import checks, horovod_checks
from hvdtrain.doctor.checks import (
    Check,
    Options,
    Result,
    as_json,
    fail,
    lines_of,
    ok,
    run_checks,
    skip,
    summary,
    warn,
)
from hvdtrain.launch.running.timed_command import CompletedCommand, end_all, run

ROOT = Path(__file__).parents[2]


def check(
    look: Callable[[], Sequence[Result]], name: str = "x", group: str = "Group", limit: float = 5
) -> Check:
    return Check(group, name, look, limit)


def run_all(wanted: Sequence[Check]) -> list[Result]:
    return [result for _, results in run_checks(wanted) for result in results.result()]


def test_groups_run_beside_each_other_and_show_in_order() -> None:
    barrier = threading.Barrier(2, timeout=5)

    def look(name: str) -> Callable[[], Sequence[Result]]:
        def meet() -> Sequence[Result]:
            barrier.wait()
            return [ok(name, "met")]

        return meet

    found = run_all([check(look("a"), "a", "A"), check(look("b"), "b", "B")])
    assert [result.name for result in found] == ["a", "b"]


def test_one_group_runs_in_turn() -> None:
    running: list[str] = []

    def look(name: str) -> Callable[[], Sequence[Result]]:
        def alone() -> Sequence[Result]:
            running.append(name)
            time.sleep(0.05)
            seen = ",".join(running)
            running.remove(name)
            return [ok(name, seen)]

        return alone

    wanted = [check(look(name), name) for name in "abc"]
    assert [result.seen for result in run_all(wanted)] == ["a", "b", "c"]


def test_a_line_is_shown_while_later_ones_run() -> None:
    later = threading.Event()

    def wait() -> Sequence[Result]:
        later.wait(5)
        return [ok("second", "")]

    wanted = [check(lambda: [ok("first", "")], "first", "A"), check(wait, "second", "B")]
    found = run_checks(wanted)
    assert next(found)[1].result()[0].name == "first"
    second, results = next(found)
    assert second.group == "B" and not results.done(), "its heading can be shown before its results"
    later.set()
    assert results.result(5)[0].name == "second"


def test_a_check_that_hangs_is_a_red_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_SPARE_SECONDS", 0)
    hang = threading.Event()
    wanted = [
        check(lambda: [ok("x", str(hang.wait(30)))], "stuck", limit=0.2),
        check(lambda: [ok("next", "")], "next"),
    ]
    red, green = run_all(wanted)
    hang.set()
    assert (red.name, red.status, red.seen) == ("stuck", "fail", "took longer than 0.2 s")
    assert "--timeout" in red.fix
    assert green.status == "ok"


def test_a_check_that_breaks_is_a_red_line() -> None:
    (red,) = run_all([check(lambda: [ok("x", str(1 // 0))])])
    assert red.status == "fail"
    assert "ZeroDivisionError" in red.seen


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    # The grandchild leaves the session and holds the pipe, as ranks do. In the time limit it must have started.
    lines = f"setsid /bin/sh -c 'echo $$ > {tmp_path}/pid; exec /bin/sleep 60' & wait"
    environ = path_with(tmp_path / "bin", {"slow": lines})
    environ["PATH"] += os.pathsep + os.environ["PATH"]
    start = time.monotonic()
    said = run(["slow"], limit=3, environ=environ)
    assert said is not None
    assert said.returncode is None
    assert time.monotonic() - start < 40
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_a_missing_command_is_none() -> None:
    assert run(["no-such-program-here"], limit=1, environ={"PATH": "/nowhere"}) is None


def test_lines_are_aligned_and_coloured() -> None:
    green, red = lines_of(ok("Python", "3.11")), lines_of(fail("shared memory", "full", "empty it"))
    assert "\x1b[32m" in green[0]
    assert "\x1b[31m" in red[0]
    plain = [re.sub(r"\x1b\[\d+m", "", line) for line in green + red]
    assert plain[0].index("3.11") == plain[1].index("full") == plain[2].index("fix: empty it")


def test_a_result_is_one_line_whatever_a_program_says() -> None:
    """Control characters would move in the terminal, a second line could forge a result."""
    said = "no\n  ok    forged\x1b[2J \udcff\u202e é"
    (line,) = lines_of(skip("docker", said))
    assert line.endswith("no?  ok    forged?[2J ?? é")
    long = lines_of(fail("docker", "x" * 100_000_000, "mend it"))
    assert len(long[0]) < 600 and long[0].endswith("x...")


def test_summary() -> None:
    findings = [fail("a", "b", "c"), fail("a", "b", "c"), warn("a", "b", "c"), ok("a", "b")]
    assert "2 failures, 1 warning (3 s)" in summary(findings, 3.2)
    assert "everything passed (1 s)" in summary([ok("a", "b"), skip("c", "d")], 1.0)


def test_json_schema_is_stable() -> None:
    """Programs read it: a change of names or meaning needs a new schema number."""
    found = [("Software", ok("Keras", "3.15")), ("Machine", fail("cores", "none", "buy one"))]
    assert json.loads(as_json(found, {"hvdtrain": "1.2"}, 2.345)) == {
        "schema": 1,
        "ok": False,
        "failures": 1,
        "warnings": 0,
        "seconds": 2.3,
        "hvdtrain": "1.2",
        "findings": [
            {"group": "Software", "name": "Keras", "status": "ok", "seen": "3.15", "fix": ""},
            {
                "group": "Machine",
                "name": "cores",
                "status": "fail",
                "seen": "none",
                "fix": "buy one",
            },
        ],
    }


def call(*args: str) -> Called:
    return CliRunner().invoke(main, ["doctor", *args], prog_name="hvdtrain")


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """The results of the one check that the command runs."""
    listed = [ok("first", "good")]
    part = SimpleNamespace(checks=lambda options: [check(lambda: listed)])
    monkeypatch.setattr(command, "PARTS", [part])
    return listed


def test_exit_code_and_output(findings: list[Result]) -> None:
    good = call()
    assert good.exit_code == 0
    assert good.stdout.splitlines()[0] == "Group"
    assert "everything passed" in good.stdout
    findings.append(fail("second", "bad", "mend it"))
    bad = call()
    assert bad.exit_code == 1
    assert re.search(r"FAIL  second +bad\n +fix: mend it\n1 failure ", bad.stdout)
    assert "\x1b" not in bad.stdout, "not a terminal"
    answer = call("--json")
    assert (answer.exit_code, json.loads(answer.stdout)["failures"]) == (1, 1)


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300"])
def test_a_time_that_is_no_time(findings: list[Result], seconds: str) -> None:
    assert call("--timeout", seconds).exit_code == 0


def test_a_closed_standard_output() -> None:
    code = """
import importlib, types
from hvdtrain.cli.command_table import main
importlib.import_module("hvdtrain.cli.doctor").PARTS = [types.SimpleNamespace(checks=lambda options: [])]
main(["doctor"])
"""
    closed = ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-c", code]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(closed, env=environ, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_hosts_and_their_joint_allreduce(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"a": ok("ssh", "fine"), "b": ok("ssh", "fine")}
    seen: list[Options] = []

    def hosts(options: Options) -> list[Check]:
        seen.append(options)
        return [
            check(lambda name=name: [states[name]], name, f"Host {name}")  # type: ignore[misc]
            for name in options.hosts
        ]

    joint = check(lambda: [ok("joint", "2 ranks")], "joint", "All hosts")
    monkeypatch.setattr(command, "PARTS", [SimpleNamespace(checks=hosts)])
    monkeypatch.setattr(horovod_checks, "joint_checks", lambda options: [joint])
    assert "2 ranks" in call("-H", "a:4,b", "--ssh-port", "2222").stdout
    assert (seen[0].hosts, seen[0].ssh_port) == (("a", "b"), 2222)
    states["b"] = fail("ssh", "closed", "open it")
    result = call("--hosts", "a,b")
    assert result.exit_code == 1
    assert re.search(r"skip  allreduce +skipped until every host passes", result.stdout)


def test_hostfile(findings: list[Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=4 # first\n\nnode2 slots=2\n")
    joint = check(lambda: [ok("joint", "x")], "joint", "All hosts")
    seen: list[Options] = []
    monkeypatch.setattr(
        horovod_checks, "joint_checks", lambda options: (seen.append(options), [joint])[1]
    )
    assert call("--hostfile", str(tmp_path / "hosts")).exit_code == 0
    assert seen[0].hosts == ("node1", "node2")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-H", "a", "--hostfile", "b"], "use only one of them"),
        (["-H", "a b"], "cannot read 'a b:1'"),
        (["-H", "a,a"], "host a is named twice"),
        (["--ssh-identity-file", "/nowhere/key"], "does not exist"),
        (["--ssh-port", "70000"], "not in the range"),
        (["--timeout", "0"], "not in the range"),
    ],
)
def test_wrong_usage(args: list[str], message: str) -> None:
    result = call(*args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_every_group_is_checked() -> None:
    options = Options(os.environ)
    groups = [check.group for part in command.PARTS for check in part.checks(options)]
    assert list(dict.fromkeys(groups)) == ["Software", "Machine", "Slurm", "Containers", "Horovod"]


def test_the_doctor_itself_loads_no_tensorflow() -> None:
    code = """
import sys
from hvdtrain.cli.doctor import doctor
from hvdtrain.doctor.software import check_versions
check_versions()
print(sorted({"tensorflow", "keras", "horovod", "numpy"} & set(sys.modules)))
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_commands_that_run_can_be_ended_at_once(tmp_path: Path) -> None:
    environ = path_with(tmp_path, {"slow": "exec /bin/sleep 60"})
    ended: list[CompletedCommand | None] = []
    thread = threading.Thread(target=lambda: ended.append(run(["slow"], limit=60, environ=environ)))
    thread.start()
    while not children():
        time.sleep(0.01)
    end_all()
    thread.join(5)
    assert [said.returncode for said in ended if said] == [-signal.SIGTERM]


def children() -> str:
    return "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))


def test_no_check_starts_once_nobody_listens() -> None:
    started: list[str] = []
    first = check(lambda: [ok("a", "")], "a")

    def second() -> Sequence[Result]:
        started.append("b")
        return [ok("b", "")]

    hold = threading.Event()
    slow = check(lambda: [ok("x", str(hold.wait(5)))], "x")
    found = run_checks([first, slow, check(second, "b")])
    next(found)[1].result()
    found.close()  # type: ignore[attr-defined]
    hold.set()
    time.sleep(0.2)
    assert started == []


@pytest.mark.slow
def test_colours_on_a_terminal_unless_no_color_is_set(
    findings: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> str:
        # `color` stands for a terminal: what is written there is not stripped.
        return CliRunner().invoke(main, ["doctor"], color=True).stdout

    assert "\x1b[32m" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown()
