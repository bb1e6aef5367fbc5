"""One task of srun: its place in Horovod's words, and its output with marks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.environment import RANK_CORES
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.addresses import interface_towards
from hvdtrain.launch.running.output_parser import TagReader
from hvdtrain.launch.slurm.task_variables import task_environment
from hvdtrain.start.parts.output_tags import LONGEST_PIECE, marked
from hvdtrain.worker.rank_environment import rank_environment


def task(rank: int, node: int, local: int, layout: str, **more: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_TASKS_PER_NODE": layout,
        "SLURMD_NODENAME": f"n{node}",
        **more,
    }


def test_the_places_of_an_uneven_job() -> None:
    """Two ranks on n0, one on n1, two on n2: local rank 1 exists on two nodes only."""
    tasks = [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 2, 0), (4, 2, 1)]
    names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"]
    places = []
    for one in tasks:
        place = task_environment(task(*one, "2,1,2"), 8)
        places.append(" ".join(place[f"HOROVOD_{name}"] for name in names))
    assert places == [
        "0 5 0 2 0 3 n0",
        "1 5 1 2 0 2 n0",
        "2 5 0 1 1 3 n1",
        "3 5 0 2 2 3 n2",
        "4 5 1 2 1 2 n2",
    ]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_places_agree_with_horovods_own(counts: list[int]) -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

    hosts = ",".join(f"n{node}:{count}" for node, count in enumerate(counts))
    slots = get_host_assignments(parse_hosts(hosts), sum(counts))
    assert len(slots) == sum(counts)
    for slot in slots:
        node = int(slot.hostname[1:])
        layout = ",".join(map(str, counts))
        place = task_environment(task(slot.rank, node, slot.local_rank, layout), 1)
        assert place["HOROVOD_HOSTNAME"] == slot.hostname
        for name in ("size", "local_size", "cross_rank", "cross_size"):
            assert place[f"HOROVOD_{name.upper()}"] == str(getattr(slot, name))


@pytest.mark.parametrize(
    ("variables", "affinity", "share"),
    [
        ({}, 8, 4),  # Nothing known: the node's cores, shared.
        ({"SLURM_CPUS_ON_NODE": "4"}, 64, 2),  # Not bound: the job has 4 of the node's 64 cores.
        ({"SLURM_CPUS_ON_NODE": "8"}, 8, 4),  # The job is bound to its 8, its tasks share them.
        ({"SLURM_CPUS_ON_NODE": "8"}, 4, 4),  # The task is bound to its own 4.
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "8"}, 8, 3),
        ({"SLURM_CPUS_PER_TASK": "8"}, 2, 2),  # No more threads than it may run on.
        ({"SLURM_CPUS_ON_NODE": "1"}, 8, 1),
    ],
)
def test_the_cores_of_a_task(variables: dict[str, str], affinity: int, share: int) -> None:
    environ = task(0, 0, 0, "2", **variables)
    environ |= task_environment(environ, affinity)
    assert environ[RANK_CORES] == str(share)
    assert rank_environment(environ, affinity)["TF_NUM_INTRAOP_THREADS"] == str(share)


def test_outside_of_srun() -> None:
    with pytest.raises(HvdtrainError, match="runs as a task of srun"):
        task_environment({}, 1)


def test_the_interface_of_an_address() -> None:
    assert interface_towards("127.0.0.1") == "lo"


OUTPUT = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 2),
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from([b"\n", b"50%\r", b"a\r\nb\n", b"x" * 3000, b"[1]<std", b"y" * 900]),
        ),
    )
)


@given(OUTPUT, st.randoms())
def test_marked_output_is_taken_apart_again(
    written: list[tuple[int, int, bytes]], chance: random.Random
) -> None:
    """Whole lines of several ranks mix in any order, as srun passes them on."""
    expected: dict[tuple[int, str], bytes] = defaultdict(bytes)
    queues: dict[int, list[bytes]] = defaultdict(list)
    for rank, descriptor, data in written:
        expected[rank, "stdout" if descriptor == 1 else "stderr"] += data
        whole = marked(data, rank, descriptor, LONGEST_PIECE).split(b"\n")[:-1]
        queues[rank] += [line + b"\n" for line in whole]
    assert all(len(line) <= 1000 for lines in queues.values() for line in lines)
    stream = b""
    while any(queues.values()):
        stream += queues[chance.choice([rank for rank in queues if queues[rank]])].pop(0)
    found: dict[tuple[int | None, str], bytes] = defaultdict(bytes)
    reader = TagReader("stdout")
    for piece in [*reader.feed(stream), *reader.finish()]:
        found[piece.rank, piece.stream] += piece.data
    assert {key: data for key, data in found.items() if data} == {
        key: data for key, data in expected.items() if data
    }


def run_task(
    code: str, program: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "hvdtrain.start.slurm_task", program, "-c", code],
        env={**os.environ, "PYTHONUNBUFFERED": "", **task(3, 1, 1, "2,2"), **environment},
        capture_output=True,
        timeout=60,
    )


def test_a_task_runs_its_command() -> None:
    code = (
        "import os, sys\n"
        "print(os.environ['HOROVOD_RANK'], 'of', os.environ['HOROVOD_SIZE'])\n"
        f"os.write(2, b'z' * {LONGEST_PIECE + 1})\n"
        "sys.exit(5)\n"
    )
    done = run_task(code)
    assert done.returncode == 5
    assert done.stdout == b"[3]<stdout>:3 of 4\n"
    assert done.stderr == b"[3]<stderr>:%s\n[3]<stderr>:z\n" % (b"z" * LONGEST_PIECE)


def test_a_task_tells_that_it_is_there_and_that_it_has_ended() -> None:
    """Also of a command that is no Python script."""
    lines = run_task("pass", HVDTRAIN_TERMINAL="0", HVDTRAIN_LAUNCH_ID="x").stdout.splitlines()
    told = [json.loads(line.removeprefix(b"[3]<news>:")) for line in lines]
    assert [(one["task"], one["ended"]) for one in (told[0], told[-1])] == [(3, False), (3, True)]


def test_a_killed_command_is_told_as_shells_do() -> None:
    assert run_task("import os; os.kill(os.getpid(), 9)").returncode == 128 + signal.SIGKILL


def test_a_process_that_the_rank_left_behind_is_not_waited_for() -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '30']); print(p.pid)"
    begun = time.monotonic()
    done = run_task(code)
    assert time.monotonic() - begun < 15
    os.kill(int(done.stdout.split(b":")[1]), signal.SIGKILL)


def test_a_process_that_the_rank_left_behind_and_that_goes_on_writing() -> None:
    writer = ["timeout", "30", "sh", "-c", "while sleep 0.02; do echo more; done"]
    begun = time.monotonic()
    done = run_task(f"import subprocess; subprocess.Popen({writer}); print('done')")
    assert time.monotonic() - begun < 15
    assert b"[3]<stdout>:done\n" in done.stdout


def test_a_command_that_cannot_start() -> None:
    done = run_task("", program="no-such-program")
    assert (done.returncode, done.stderr) == (
        127, b"Error: cannot start no-such-program: No such file or directory\n",
    )  # fmt: skip


def test_signals_to_all_processes_leave_the_marker_alive() -> None:
    """Slurm signals the whole task; what the command says last must still get out."""
    code = (
        "import os, signal, time\n"
        "def stop(*_): print('bye', flush=True); os._exit(4)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "os.kill(os.getppid(), signal.SIGTERM); os.kill(os.getppid(), signal.SIGUSR1)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)  # Nobody listens: lost, not deadly.\n"
        "time.sleep(0.2); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)\n"
    )
    done = run_task(code)
    assert (done.returncode, done.stdout) == (4, b"[3]<stdout>:bye\n")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"SLURM_NODEID": "9" * 5000}, "SLURM_NODEID='9{40}' is not a number"),
        ({"SLURM_PROCID": "first"}, "SLURM_PROCID='first' is not a number"),
        ({"SLURM_LOCALID": "-1"}, "SLURM_LOCALID='-1' is not a number"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 and SLURM_LOCALID=0 are no task of .*=2,1"),
        ({"SLURM_LOCALID": "2"}, "SLURM_NODEID=0 and SLURM_LOCALID=2 are no task of .*=2,1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "cannot read 'two'"),
    ],
)
def test_variables_that_are_no_place(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(HvdtrainError, match=said):
        task_environment(task(0, 0, 0, "2,1") | wrong, 8)


@pytest.mark.parametrize("name", ["SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"])
def test_a_number_of_cores_that_is_none(name: str) -> None:
    found = task_environment(task(0, 0, 0, "2,1") | {name: "9" * 5000}, 8)
    assert found == task_environment(task(0, 0, 0, "2,1"), 8)
