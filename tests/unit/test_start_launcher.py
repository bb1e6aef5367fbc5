"""What is told to Horovod's launcher in place of its questions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.start import launcher
from hvdtrain.start.launcher import exit_code_of, launch_ranks, own_arguments, split_arguments

REPOSITORY = Path(__file__).parents[2]


def test_arguments_before_and_after_the_dashes() -> None:
    given = ["--env", "A", "--env", "B", "--", "-np", "2", "python", "--", "x"]
    own, horovods = split_arguments(given)
    assert own_arguments(own) == {"A", "B"}
    assert horovods == ["-np", "2", "python", "--", "x"]
    with pytest.raises(SystemExit, match="usage"):
        split_arguments(["-np", "2"])


def test_a_variable_that_is_asked_for_must_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    """A pasted command of --dry-run names secrets without their values."""
    assert launch_ranks(["--env", "PATH", "--env", "NO_KEY", "--", "--help"]) == 2
    said = "hvdtrain: --env NO_KEY: not set here, so no rank would have it: set it before\n"
    assert capsys.readouterr().err == said


def test_without_ssh_other_hosts_are_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(launcher, "_remote_hosts", lambda parsed: ["a", "b"])
    monkeypatch.setenv("HVDTRAIN_LAUNCH_ID", "x")
    assert launch_ranks(["--", "-np", "2", "-H", "a:1,b:1", "python"]) == 1
    assert capfd.readouterr().err.startswith("hvdtrain: ssh reaches the other hosts, and is not in")


def test_the_exit_code_of_the_rank_that_ended_first() -> None:
    text = "Horovod detected\nProcess name: 1\nExit code: {}\n"
    assert exit_code_of(RuntimeError(text.format(7))) == 7
    assert exit_code_of(RuntimeError(text.format(256))) == 1
    assert exit_code_of(RuntimeError("something else")) == 1


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_what_horovod_is_told(controller: str) -> None:
    """In a process of its own, for Horovod's modules are changed there."""
    code = f"""
import argparse, json, os, sys
from hvdtrain.start import launcher
from hvdtrain.start.horovods import horovod_env, launch
arguments = argparse.Namespace(use_gloo={controller == "gloo"})
launcher._teach_horovod(arguments, frozenset({{"WANTED", "WANTED_KEY"}}), checked=True)
print(json.dumps({{
    "travels": [name for name in sys.argv[1:] if horovod_env.is_exportable(name)],
    "built": [launch.mpi_built(), launch.gloo_built(verbose=True)],
    "ssh": launch._check_all_hosts_ssh_successful(["nowhere"], None, None, fn_cache=None),
    "heavy": sorted({{"tensorflow", "setuptools"}} & set(sys.modules)),
}}))
"""
    names = ["PATH", "WANTED", "WANTED_KEY", "TF_TOKEN", "UNWANTED", "OLDPWD"]
    names += ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"]
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    secrets = [] if controller == "gloo" else ["WANTED_KEY", "TF_TOKEN"]
    assert sorted(told["travels"]) == sorted(["PATH", "WANTED", "NCCL_DEBUG", *secrets])
    assert (told["built"], told["ssh"], told["heavy"]) == ([True, True], True, [])


def test_any_bytes_of_a_rank_come_through() -> None:
    """A strict decoder would raise at a character that is cut, and the output would stop there."""
    code = """
import argparse
from hvdtrain.start import launcher
from hvdtrain.start.horovods import safe_shell_exec
launcher._teach_horovod(argparse.Namespace(use_gloo=True), frozenset(), checked=False)
raise SystemExit(safe_shell_exec.execute(r"printf 'a\\377b\\nc\\303'", index=0))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"[0]<stdout>:a\xffb\n[0]<stdout>:c\xc3"
