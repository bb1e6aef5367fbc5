"""Each program of a launch is killed (SIGKILL) at a random moment while it starts, while ranks run, and while it ends.

The run then ends within seconds, names what was killed, and leaves nothing on any host.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hanging import ALL_CASES
from jobs import RANK, SECONDS, user_environment
from namespaces import NamespaceHost, child_of

END_SECONDS = 15
"""Open MPI's daemons take their time, and this machine may halt for ten seconds."""
# Without Horovod, whose own errors would end the ranks as well.
SCRIPT = (
    RANK + "open(f'started.{rank}', 'w').close()\n"
    "while not os.path.exists('stop'):\n    time.sleep(0.05)\n"
)
HVDTRAIN = (sys.executable, "-m", "hvdtrain.cli", "run")
MOMENTS = {"starting": 0.2, "training": 1.0, "ending": 0.5}
"""Seconds within which the signal is sent."""


@dataclass(frozen=True)
class Program:
    """One of a launch.

    Attributes:
        there: whether on the other host.
        line: how its command line begins.
        says: what the run then says.
        number: among processes with such a line, the oldest first.
    """

    there: bool
    line: str
    says: str
    number: int = 0


KILLED = r"was killed by SIGKILL"
WAITS = rf" \(process \d+\), which starts the ranks and waits for them, {KILLED}"
PYTHON = r"\S+ -P -m hvdtrain\."
RANKS = {
    "rank here": Program(False, PYTHON + r"worker ", rf"^rank 0 {KILLED}"),
    "rank there": Program(True, PYTHON + r"worker ", rf"^rank 1 {KILLED}"),
}
BROKE = "connection to host node2 was lost"
HOROVODRUN = {
    "supervisor": Program(False, PYTHON + r"start\.run_horovod ", rf"^horovodrun {KILLED}"),
    "ssh of the agent": Program(
        False,
        r"ssh .*start\.agent",
        rf"{BROKE}: the local ssh process that ran its agent {KILLED}|node2: the local ssh process .* SIGKILL",
    ),
    "agent": Program(
        True,
        PYTHON + r"start\.agent ",
        rf"{BROKE}, or hvdtrain's agent there was killed|host node2: ssh failed: no output",
    ),
    **RANKS,
}
SSH = rf"{BROKE}: the local ssh process that ran rank 1 {KILLED}"
PROGRAMS = {
    "mpi": {
        "mpirun": Program(False, r"\S*mpirun (?!--version)", "^mpirun" + WAITS),
        "ssh of mpirun": Program(
            False, r"\S*ssh .*orted", r"^mpirun's daemon \(orted\) on another host (was|did not)"
        ),
        "orted": Program(
            True, r"\S*orted ", r"host node2 was lost: its orted|\(orted\) on another"
        ),
        **HOROVODRUN,
    },
    "gloo": {
        "launcher": Program(
            False, PYTHON + r"start\.run_horovod ", "^Horovod's launcher" + WAITS, 1
        ),
        "helper": Program(False, r"\S+ .*spawn_main", rf"for rank \d, .*{KILLED}"),
        "second helper": Program(False, r"\S+ .*spawn_main", rf"for rank \d, .*{KILLED}", 1),
        "shell here": Program(
            False,
            r"/bin/sh -c env ",
            rf"local shell that ran rank 0 {KILLED}|for rank 0, .* was killed by SIGTERM",
        ),
        "shell of ssh": Program(False, r"/bin/sh -c ssh ", SSH),
        "ssh": Program(False, r"ssh .*hvdtrain\.worker", SSH),
        "shell there": Program(True, r"sh -c cd ", BROKE),
        **HOROVODRUN,
    },
    "srun": {
        "supervisor": Program(
            False, PYTHON + r"start\.run_srun ", rf"run_srun, which runs srun, {KILLED}"
        ),
        "srun": Program(False, r"srun ", "^srun" + WAITS),
        "task here": Program(False, PYTHON + r"start\.slurm_task ", rf"^rank 0 {KILLED}"),
        "task there": Program(True, PYTHON + r"start\.slurm_task ", rf"^rank 1 {KILLED}"),
        **RANKS,
    },
}
EVERY = [
    (launcher, name, moment)
    for launcher, programs in PROGRAMS.items()
    for name in programs
    for moment in MOMENTS
]
SOME = [
    ("mpi", "ssh of mpirun", "training"),
    ("mpi", "agent", "training"),
    ("mpi", "mpirun", "ending"),
    ("gloo", "second helper", "training"),
    ("gloo", "shell of ssh", "training"),
    ("gloo", "ssh", "training"),
    ("gloo", "ssh of the agent", "starting"),
    ("srun", "srun", "training"),
    ("srun", "task there", "starting"),
]


def start(
    request: pytest.FixtureRequest, launcher: str, folder: Path
) -> tuple[subprocess.Popen[str], Sequence[NamespaceHost]]:
    """A launch of two ranks, one on each of two hosts."""
    (folder / "train.py").write_text(SCRIPT)
    if launcher == "srun":
        slurm = request.getfixturevalue("slurm")
        nodes = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
        return slurm.start(*nodes, *HVDTRAIN, "train.py", cwd=folder), slurm.hosts
    hosts: Mapping[str, NamespaceHost] = request.getfixturevalue("hosts")
    options = ("-H", "node1:1,node2:1", "--controller", launcher)
    process = subprocess.Popen(
        hosts["node1"].argv([*HVDTRAIN, *options, "train.py"], folder),
        env=user_environment(HOME=str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, (hosts["node1"], hosts["node2"])


def find(program: Program, hosts: Sequence[NamespaceHost]) -> int | None:
    host = hosts[program.there]
    found = [
        pid
        for pid, line in sorted(host.processes().items())
        if pid not in host.quiet and re.match(program.line, line)
    ]
    return found[program.number] if len(found) > program.number else None


@pytest.mark.parametrize(("launcher", "name", "moment"), EVERY if ALL_CASES else SOME)
def test_a_killed_program(
    request: pytest.FixtureRequest, tmp_path: Path, launcher: str, name: str, moment: str
) -> None:
    program = PROGRAMS[launcher][name]
    process, hosts = start(request, launcher, tmp_path)
    try:
        pid = None
        deadline = time.monotonic() + SECONDS
        while pid is None or (
            moment != "starting" and len(list(tmp_path.glob("started.?"))) < len(hosts)
        ):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
            pid = find(program, hosts)
        if moment == "ending":
            (tmp_path / "stop").touch()
        after = random.uniform(0, MOMENTS[moment])
        time.sleep(after)
        # What was seen first may have been a child before its exec.
        while (pid := find(program, hosts)) is None and moment == "starting":
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=END_SECONDS)
        context = f"killed after {after:.2f} s: {stderr}"
        # An end may be past the point where the program mattered.
        if process.returncode or moment != "ending":
            assert pid is not None and process.returncode, context
            assert re.search(program.says, stderr, re.MULTILINE), context
            assert "Traceback" not in stderr, context
        left = {host.name: found for host in hosts if (found := host.left(END_SECONDS))}
        assert left == {}, context
    finally:
        if process.poll() is None:  # Only a failed test leaves one.
            os.kill(child_of(process.pid), signal.SIGKILL)
            process.wait()
