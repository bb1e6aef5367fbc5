"""hvdtrain.start.run_srun with a program that plays srun: what it is given, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from pathlib import Path

import pytest

from hvdtrain.errors import EngineError
from hvdtrain.start.parts.srun_launcher import awaited_tasks, rendezvous_address

SRUN = """\
#!{python}
import json, os, signal, sys, time
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append("USR1"))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGUSR1}})  # srun blocks it and waits for it.
with open("srun.tmp", "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
os.rename("srun.tmp", "srun.json")
for _ in range(int(sys.argv[1])):
    time.sleep(0.05)
    if got:
        sys.exit(9)
sys.exit(4)
"""
Started = subprocess.Popen[str]


def start(
    folder: Path, options: str, ticks: int, pass_fds: tuple[int, ...] = (), **environment: str
) -> Started:
    program = folder / "srun"
    program.write_text(SRUN.format(python=sys.executable))
    program.chmod(0o755)
    argv = [sys.executable, "-P", "-m", "hvdtrain.start.run_srun", *options.split()]
    return subprocess.Popen(
        [*argv, str(program), str(ticks), "--nodes=2"],
        cwd=folder,
        env={**os.environ, "DATA": "/here", "HVDTRAIN_FORWARD": "DATA", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )


def seen(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment of srun."""
    deadline = time.monotonic() + 60
    while not (folder / "srun.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    argv, environment = json.loads((folder / "srun.json").read_text())
    return argv, environment


def test_over_gloo_srun_gets_a_rendezvous_and_horovods_settings(tmp_path: Path) -> None:
    options = "-np 3 --gloo -H n1:2,n2:2 --fusion-threshold-mb 64 --network-interfaces eth7"
    process = start(tmp_path, options, 40, DATA="/d", UNASKED="x", SLURM_JOB_ID="7")
    argv, environment = seen(tmp_path)
    assert argv == ["40", "--nodes=2"]
    assert environment["HOROVOD_FUSION_THRESHOLD"] == str(64 * 2**20)
    assert environment["HOROVOD_CONTROLLER"] == environment["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert environment["HOROVOD_GLOO_IFACE"] == environment["NCCL_SOCKET_IFNAME"] == "eth7"
    assert (environment["DATA"], environment["SLURM_JOB_ID"]) == ("/d", "7")
    assert "UNASKED" not in environment
    # The rendezvous answers there: nothing is known under this name yet.
    address, port = (environment[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    url = f"http://{address}:{port}/global/0"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url, timeout=5)
    assert process.wait(60) == 4


@pytest.mark.parametrize(
    ("hosts", "interfaces", "expected"),
    [
        ("n1:2", {}, "127.0.0.1"),  # The only node is this one.
        ("n1:2,127.0.0.3:2", {}, "127.0.0.1"),  # By the route to the first of the others.
        ("n1:2,127.0.0.3:2", {"lo", "ib7"}, "127.0.0.1"),
    ],
)
def test_where_the_rendezvous_is(hosts: str, interfaces: set[str], expected: str) -> None:
    options = Namespace(hosts=hosts, nics=interfaces)
    assert rendezvous_address(options, {"SLURMD_NODENAME": "n1"}) == expected


@pytest.mark.parametrize(
    ("command", "seconds", "begin"),
    [
        (["srun", "python"], 32, 60),
        (["srun", "python"], 400, 400),
        (["srun", "--container-image=tf", "python"], None, 300),
    ],
)
def test_which_tasks_are_awaited(command: list[str], seconds: int | None, begin: int) -> None:
    options = Namespace(hosts="n1:1,n2:2", num_proc=3, command=command, start_timeout=seconds)
    assert awaited_tasks(options) == {"tasks": ["n1", "n2", "n2"], "begin": begin}


def test_a_machine_whose_network_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "also-unknown.invalid")
    with pytest.raises(EngineError, match=r"neither node unknown\.invalid .* --network-interfaces"):
        rendezvous_address(Namespace(hosts="unknown.invalid:1", nics=None), {})


def test_over_mpi_there_is_no_rendezvous(tmp_path: Path) -> None:
    news = os.open(tmp_path / "news", os.O_CREAT | os.O_WRONLY)
    options = "-np 2 --mpi -H n1:1,n2:1 --network-interfaces eth7"
    settings = {"HVDTRAIN_NEWS": str(news), "OMPI_MCA_btl": "tcp,self"}
    process = start(tmp_path, options, 0, **settings, pass_fds=(news,))
    os.close(news)
    _, environment = seen(tmp_path)
    assert json.loads((tmp_path / "news").read_text())["tasks"] == ["n1", "n2"]
    assert process.wait(60) == 4
    assert environment["OMPI_MCA_btl_tcp_if_include"] == "eth7"
    assert environment["OMPI_MCA_pml"] == "ob1", "as under horovodrun"
    assert environment["OMPI_MCA_btl"] == "tcp,self", "what the user has set stays"
    assert "HOROVOD_GLOO_RENDEZVOUS_PORT" not in environment
    assert "HOROVOD_CONTROLLER" not in environment


def test_the_warning_goes_on_to_srun(tmp_path: Path) -> None:
    process = start(tmp_path, "-np 1 --gloo -H n1:1", 400)
    seen(tmp_path)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 9


def test_a_killed_srun_is_told_as_shells_do(tmp_path: Path) -> None:
    process = start(tmp_path, "-np 1 --gloo -H n1:1", 400)
    seen(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM


def test_a_killed_srun_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, "-np 1 --gloo -H n1:1", 400)
    seen(tmp_path)
    (srun,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(srun), signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert f"hvdtrain: srun (process {srun}), which starts the ranks" in stderr
    assert "was killed by SIGKILL" in stderr


# srun is the only child of hvdtrain.start.run_srun, beside this.
SHOW_STEPS = """
read -r srun _ < /proc/$PPID/task/$PPID/children
echo "StepId=7.0 UserId=0 State=RUNNING SrunHost:Pid=$(hostname -s):1"
echo "StepId=7.1 UserId=0 State=RUNNING SrunHost:Pid=$(hostname -s):$srun"
"""


@pytest.mark.parametrize("times", [1, 2])
def test_the_tasks_have_the_grace_period_unless_asked_twice(tmp_path: Path, times: int) -> None:
    for name, script in (("scontrol", SHOW_STEPS), ("scancel", '\necho "$@" >> sent\n')):
        (tmp_path / name).write_text(f"#!/bin/sh{script}")
        (tmp_path / name).chmod(0o755)
    grace = 1.5 if times == 1 else 60.0
    settings = {"HVDTRAIN_GRACE_SECONDS": str(grace), "SLURM_JOB_ID": "7"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    process = start(tmp_path, "-np 1 --gloo -H n1:1", 400, PATH=path, **settings)
    seen(tmp_path)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    while not (tmp_path / "sent").exists():
        assert process.poll() is None, "srun was ended, although its tasks may be saving"
        time.sleep(0.02)
    if times == 2:
        process.send_signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGINT
    assert (time.monotonic() - asked >= grace) == (times == 1)
    assert (tmp_path / "sent").read_text() == f"--signal={signal.SIGURG.value} 7.1\n"


EARLY = """
import os, signal, subprocess, sys
from hvdtrain.start.parts import srun_launcher
popen = subprocess.Popen
def late(*arguments, **settings):
    os.kill(os.getpid(), signal.SIGTERM)
    return popen(*arguments, **settings)
subprocess.Popen = late
sys.exit(srun_launcher._run(["sleep", "20"], dict(os.environ)))
"""


def test_a_signal_before_srun_is_there_goes_on_to_it() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], timeout=60)
    assert done.returncode == 128 + signal.SIGTERM


def test_no_srun(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hvdtrain.start.run_srun", "-np", "1", "--gloo", "-H", "a:1", "no-srun"],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        127,
        "hvdtrain: cannot start no-srun: No such file or directory\n",
    )


def test_a_variable_that_is_not_set_is_refused(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-m", "hvdtrain.start.run_srun", "true"]
    environ = {**os.environ, "HVDTRAIN_FORWARD": "ABSENT"}
    ran = subprocess.run(
        argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 2
    assert "--env ABSENT: not set in this environment" in ran.stderr
