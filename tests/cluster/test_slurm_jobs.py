"""Jobs of a real Slurm: they train as local ranks do, are warned, requeued, cancelled, and leave
nothing on any node."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import hanging
import numpy as np
import pytest
from jobs import RANK, REPOSITORY, SECONDS, user_environment
from mnist import MNIST, TOLERANCE, weights
from slurm_cluster import SlurmCluster

HVDTRAIN = (sys.executable, "-m", "hvdtrain.cli")
TWO_BY_TWO = ("--nodes", "2", "--tasks-per-node", "2", "--time", "5")
SCRIPTS = REPOSITORY / "scripts/slurm"
# Writes down what the rank sees, then waits to be ended.
REPORT = (
    RANK
    + """
import json, signal
names = ("SLURMD_NODENAME", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK", "HOROVOD_GLOO_IFACE", "HOROVOD_CYCLE_TIME", "SLURM_GPUS_ON_NODE", "API_KEY", "UNASKED")
seen = {name: os.environ.get(name) for name in names}
with open(f"seen.{rank}.tmp", "w") as file:
    json.dump(seen, file)
"""
)
WAIT = "os.rename(f'seen.{rank}.tmp', f'seen.{rank}')\ntime.sleep(600)\n"
# On Ctrl-C and SIGTERM, rank 0 saves for a second, while its child goes on; the others end at once, with an error.
SAVE = """
import subprocess
def save(number, _):
    with open("saving", "a") as file:
        file.write(f"{number}\\n")
    time.sleep(1)
    with open("saved", "w") as file:
        file.write(str(child.poll()))
    sys.exit()
if int(rank) == 0:
    child = subprocess.Popen(["sleep", "4"])
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
"""


@pytest.fixture
def folder(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Path]:
    """Where jobs are submitted; afterwards nothing of them is left."""
    yield tmp_path
    slurm.cancel_all()
    assert slurm.left(seconds=10) == []


def wait_for_ranks(folder: Path, count: int) -> list[dict[str, str | None]]:
    """What `count` ranks have seen."""
    deadline = time.monotonic() + SECONDS
    while len(list(folder.glob("seen.?"))) < count:
        said = [path.read_text() for path in folder.glob(".hvdtrain/jobs/*.out")]
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    return [json.loads((folder / f"seen.{rank}").read_text()) for rank in range(count)]


def submit(slurm: SlurmCluster, folder: Path, *arguments: str, **environment: str) -> str:
    """The number of the submitted job."""
    return slurm.run(*HVDTRAIN, "submit", *arguments, cwd=folder, **environment).strip()


def test_a_job_trains_to_the_weights_of_local_ranks(
    slurm: SlurmCluster, folder: Path, local_weights: list[np.ndarray]
) -> None:
    job = slurm.start(*HVDTRAIN, "submit", "--wait", *TWO_BY_TWO, *MNIST, "run", cwd=folder)
    stdout, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, stderr
    job_id, *shown = stdout.splitlines()
    assert f"job {job_id}: running\njob {job_id}: completed\n" in stderr
    assert any("loss" in line for line in shown)
    assert shown[-1].startswith("validation accuracy")
    for ours, local in zip(weights(folder / "run"), local_weights, strict=True):
        np.testing.assert_allclose(ours, local, rtol=0, atol=TOLERANCE)


def test_scancel_leaves_nothing(slurm: SlurmCluster, folder: Path) -> None:
    """Also of ranks that ignore SIGTERM, of a job that would requeue itself at a warning."""
    (folder / "train.py").write_text(
        REPORT + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    )
    launch = ("--controller", "gloo", "--cycle-time-ms", "2.5")
    job_id = submit(slurm, folder, *TWO_BY_TWO, *launch, "--requeue", "train.py")
    seen = wait_for_ranks(folder, 4)
    assert [one["SLURMD_NODENAME"] for one in seen] == ["n1", "n1", "n2", "n2"]
    assert {one["HOROVOD_CYCLE_TIME"] for one in seen} == {"2.5"}
    assert len(slurm.hosts[1].left()) >= 4
    slurm.run("scancel", "--batch", "--signal=USR1", job_id)
    time.sleep(1)
    slurm.run("scancel", job_id)
    assert slurm.left(seconds=10) == []
    job = slurm.wait_for(job_id, "CANCELLED")
    assert job["Restarts"] == "0"


def test_a_warned_job_goes_on_after_its_restart(slurm: SlurmCluster, folder: Path) -> None:
    """SIGUSR1 to the batch script arrives in every rank; those that stop for it are run again."""
    (folder / "train.py").write_text(
        REPORT
        + "if seen['SLURM_RESTART_COUNT']:\n"
        + "    print('going on', flush=True)\n    sys.exit(0)\n"
        + "def stop(*_):\n    open(f'warned.{rank}', 'w').close()\n    sys.exit(75)\n"
        + "signal.signal(signal.SIGUSR1, stop)\n"
        + WAIT
    )
    arguments = ("submit", "--wait", *TWO_BY_TWO, "--requeue", "train.py")
    waiting = slurm.start(*HVDTRAIN, *arguments, cwd=folder)
    job_id = str(wait_for_ranks(folder, 4)[0]["SLURM_JOB_ID"])
    slurm.run("scancel", "--batch", "--signal=USR1", job_id)
    while slurm.wait_for(job_id, "PENDING", "RUNNING")["Restarts"] == "0":
        time.sleep(0.2)
    assert sorted(path.name for path in folder.glob("warned.*")) == [
        f"warned.{r}" for r in range(4)
    ]
    slurm.start_again(job_id)
    stdout, stderr = waiting.communicate(timeout=SECONDS)
    assert (waiting.returncode, stdout.splitlines()[-1]) == (0, "going on"), stderr
    assert stderr.endswith(f"job {job_id}: completed, restart 1\n")


# The steps are slow, so that the warning comes in the middle of an epoch.
TRAINS = """
import os, sys, time
import hvdtrain
rank = hvdtrain.init().rank
import keras, numpy as np

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        open(f"seen.{rank}", "w").write('{"rank": %d}' % rank)
        time.sleep(0 if os.environ.get("SLURM_RESTART_COUNT") else float(sys.argv[2]))

def build():
    return keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])

x = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
trainer = hvdtrain.Trainer(
    build, "adam", "mse", global_batch_size=8, run_dir=sys.argv[1], checkpoints=hvdtrain.Checkpoints()
)
trainer.fit(x, x.sum(1), epochs=2, callbacks=[Slow()], verbose=0)
if rank == 0:
    np.save(sys.argv[1], np.concatenate([weight.ravel() for weight in trainer.model.get_weights()]))
"""


def test_a_training_that_is_warned_saves_and_goes_on_in_mid_epoch(
    slurm: SlurmCluster, folder: Path
) -> None:
    (folder / "train.py").write_text(TRAINS)
    by_two = ("--nodes", "2", "--tasks-per-node", "1", "--time", "5", "--requeue")
    job_id = submit(slurm, folder, *by_two, "train.py", "warned", "0.5")
    wait_for_ranks(folder, 2)
    slurm.run("scancel", "--batch", "--signal=USR1", job_id)
    while slurm.wait_for(job_id, "PENDING", "RUNNING")["Restarts"] == "0":
        time.sleep(0.2)
    slurm.start_again(job_id)
    slurm.wait_for(job_id, "COMPLETED")
    (said,) = (path.read_text() for path in folder.glob(".hvdtrain/jobs/*.out"))
    found = re.search(r"this job was asked to stop, and stopped after (\d+) steps", said)
    assert found and 0 < int(found[1]) < 40, said
    assert f"resuming in epoch 1 of 2, after step {found[1]}" in said
    subprocess.run(
        [sys.executable, "train.py", "undisturbed", "0"],
        cwd=folder,
        env=user_environment(),
        check=True,
    )
    # Two ranks add up what one process adds up in another order: float32 over 80 steps.
    warned, undisturbed = np.load(folder / "warned.npy"), np.load(folder / "undisturbed.npy")
    np.testing.assert_allclose(warned, undisturbed, atol=1e-5)


def test_a_job_of_higher_priority(slurm: SlurmCluster, folder: Path) -> None:
    """Ranks that go on after the warning are ended in time, and run again afterwards."""
    (folder / "train.py").write_text(
        REPORT
        + "signal.signal(signal.SIGUSR1, lambda *_: open(f'warned.{rank}', 'w').close())\n"
        + "if seen['SLURM_RESTART_COUNT']:\n    sys.exit(0)\n"
        + WAIT
    )
    job_id = submit(slurm, folder, *TWO_BY_TWO, "--requeue", "train.py")
    wait_for_ranks(folder, 4)
    high = slurm.run(
        *("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive"),
        *("--output=/dev/null", "--wrap=true"),
        cwd=folder,
    ).strip()
    slurm.wait_for(high, "COMPLETED")
    assert len(list(folder.glob("warned.*"))) == 4
    assert slurm.start_again(job_id)["Restarts"] == "1"
    slurm.wait_for(job_id, "COMPLETED")


def test_a_failure_is_told_once_with_its_exit_code(slurm: SlurmCluster, folder: Path) -> None:
    long = "x" * 3000
    (folder / "train.py").write_text(
        RANK + f"if rank == 3:\n    raise ValueError('{long}')\ntime.sleep(600)\n"
    )
    job = slurm.start(*HVDTRAIN, "submit", "--wait", *TWO_BY_TWO, "train.py", cwd=folder)
    stdout, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == 1
    assert f"ValueError: {long}\nlogs of all workers: " in stdout
    assert stdout.count("Traceback") == 1
    assert "rank 3 failed:" in stdout
    assert "failed, exit code 1" in stderr
    assert slurm.left(seconds=5) == []


def test_an_allocation_used_from_outside_of_it(slurm: SlurmCluster, folder: Path) -> None:
    """From a login node: srun starts a rank for each GPU, nothing that was not asked for travels, no
    value is in a command line, and Ctrl-C ends all, after they have saved."""
    (folder / "train.py").write_text(REPORT + SAVE + WAIT)
    run = ("run", "--env", "API_KEY", "train.py")
    job = slurm.start(
        *("salloc", "--quiet", "--nodelist=n2", "--gpus-per-node=2", *HVDTRAIN, *run),
        cwd=folder,
        API_KEY="0123456789",
        UNASKED="9876543210",
    )
    seen = wait_for_ranks(folder, 2)
    assert [one["SLURMD_NODENAME"] for one in seen] == ["n2", "n2"]
    assert [one["HOROVOD_LOCAL_RANK"] for one in seen] == ["0", "1"]
    for one in seen:
        assert (one["HOROVOD_SIZE"], one["HOROVOD_GLOO_IFACE"]) == ("2", "eth0")
        assert one["SLURM_GPUS_ON_NODE"] == "2"
        assert (one["API_KEY"], one["UNASKED"]) == ("0123456789", None)
    for host in slurm.hosts:
        for line in host.processes().values():
            assert "0123456789" not in line and "9876543210" not in line
    running = next(
        pid for pid, line in slurm.hosts[0].processes().items() if "hvdtrain.cli run" in line
        and "salloc" not in line
    )  # fmt: skip
    os.kill(running, signal.SIGINT)
    _, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == 130
    assert "SIGINT: stopping all workers" in stderr
    assert (folder / "saving").read_text() == f"{signal.SIGINT.value}\n"
    assert (folder / "saved").read_text() == "None"
    assert slurm.left(seconds=5) == []


def test_a_second_ctrl_c_ends_blocked_ranks_on_all_nodes(slurm: SlurmCluster, folder: Path) -> None:
    """Ranks that hear no signal, while the job itself goes on."""
    blocked = "os.rename(f'seen.{rank}.tmp', f'seen.{rank}')\nsum(iter(int, 1))\n"
    (folder / "train.py").write_text(REPORT + blocked)
    run = shlex.join([*HVDTRAIN, "run", "train.py"])
    job = slurm.start(
        *(
            "salloc",
            "--quiet",
            "--nodes=2",
            "sh",
            "-c",
            f"{run}; touch ended; until [ -e go ]; do sleep 0.1; done",
        ),
        cwd=folder,
    )
    wait_for_ranks(folder, 2)
    running = next(
        pid for pid, line in slurm.hosts[0].processes().items() if "hvdtrain.cli run" in line
        and "sh -c" not in line
    )  # fmt: skip
    os.kill(running, signal.SIGINT)
    time.sleep(2)
    begun = time.monotonic()
    os.kill(running, signal.SIGINT)
    while not (folder / "ended").exists():
        assert time.monotonic() - begun < 10, "the grace period is 30 s"
        time.sleep(0.1)
    assert slurm.hosts[1].left(5) == []
    (folder / "go").touch()
    _, stderr = job.communicate(timeout=SECONDS)
    assert "SIGINT: stopping all workers (repeat to stop at once)" in stderr


@pytest.mark.parametrize(
    ("stopped", "phase"),
    product((0, 1), hanging.PHASES) if hanging.ALL_CASES else [(1, "training")],
)
def test_a_frozen_rank(slurm: SlurmCluster, folder: Path, stopped: int, phase: str) -> None:
    (folder / "train.py").write_text(hanging.SCRIPT)
    job = slurm.start(
        *("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", *HVDTRAIN, "run"),
        *("--hang-timeout", hanging.LIMIT, "train.py", str(stopped), phase),
        cwd=folder,
    )
    _, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == hanging.EXIT_HANG, stderr
    hanging.assert_named(stderr, stopped, phase, host=f"n{stopped + 1}")
    assert "most recent call first" in stderr
    assert slurm.left(seconds=5) == []


TASK, STEP_DAEMON = r"\S+ -P -m hvdtrain\.start\.slurm_task", "slurmstepd: "
SILENT = [
    (line, number, after)
    for line, number in ((TASK, signal.SIGSTOP), (STEP_DAEMON, signal.SIGKILL))
    for after in (0.0, 0.3, 3.0)
]
"""What srun does not notice: the program, what befalls it, and after how many seconds."""


@pytest.mark.parametrize(
    ("line", "number", "after"), SILENT if hanging.ALL_CASES else [(TASK, signal.SIGSTOP, 3.0)]
)
def test_a_task_that_falls_silent(
    slurm: SlurmCluster, folder: Path, line: str, number: signal.Signals, after: float
) -> None:
    """srun notices neither."""
    (folder / "train.py").write_text(RANK + "time.sleep(600)\n")
    job = slurm.start("salloc", "--quiet", "--nodes=2", *HVDTRAIN, "run", "train.py", cwd=folder)
    there = slurm.hosts[1]
    found: list[int] = []
    while not found:
        assert job.poll() is None
        found = [
            pid
            for pid, words in there.processes().items()
            if re.match(line, words) and pid not in there.quiet
        ]
    time.sleep(after)
    os.kill(found[-1], number)
    begun = time.monotonic()
    _, stderr = job.communicate(timeout=SECONDS)
    print(f"{line} {after} {number!r}: {time.monotonic() - begun:.1f} s: {stderr}")
    assert job.returncode == hanging.EXIT_HANG, stderr
    assert re.search(r"^no report from rank 1 on host n2 for (30|60) s: ", stderr, re.MULTILINE), (
        stderr
    )
    assert slurm.left(seconds=10) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_from_outside_is_not_blamed_on_a_rank(
    slurm: SlurmCluster, folder: Path, number: signal.Signals
) -> None:
    # `hvdtrain run`, which knows of no signal, would end all ranks after the first one.
    all_save = SAVE.replace("if int(rank) == 0", "if True")
    (folder / "train.py").write_text(REPORT + all_save + WAIT)
    job = slurm.start("salloc", "--quiet", "--nodes=2", *HVDTRAIN, "run", "train.py", cwd=folder)
    wait_for_ranks(folder, 2)
    starter = next(
        pid for pid, line in slurm.hosts[0].processes().items() if "hvdtrain.start.run_srun" in line
        and "hvdtrain.cli" not in line
    )  # fmt: skip
    os.kill(starter, number)
    _, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == 128 + number, stderr
    said = {
        signal.SIGKILL: "hvdtrain.start.run_srun, which runs srun, was killed by SIGKILL",
        signal.SIGTERM: r"hvdtrain.start.run_srun \(process \d+\) was sent SIGTERM, and its ranks",
    }
    assert re.search(said[number], stderr)
    assert "rank 0" not in stderr
    saving = folder / "saving"
    saves = 2 if number == signal.SIGTERM else 0
    assert (saving.read_text() if saves else "") == f"{signal.SIGTERM.value}\n" * saves
    assert (folder / "saved").exists() == bool(saves)
    assert slurm.left(seconds=5) == []


def test_what_srun_is_given_goes_to_rank_0(slurm: SlurmCluster, folder: Path) -> None:
    """Which is on the first host of -H."""
    node = "os.environ['SLURMD_NODENAME']"
    (folder / "train.py").write_text(
        RANK + f"print(rank, {node}, repr(sys.stdin.read()), flush=True)\n"
    )
    run = shlex.join([*HVDTRAIN, "run", "--all-ranks", "-H", "n2:2,n1:2", "train.py"])
    options = ("--quiet", "--nodes=2", "--ntasks-per-node=2")
    job = slurm.start("salloc", *options, "sh", "-c", f"echo hello | {run}", cwd=folder)
    stdout, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, stderr
    read = ["n2 'hello\\n'", "n2 ''", "n1 ''", "n1 ''"]
    assert sorted(stdout.splitlines()) == [f"[{rank}] {rank} {read[rank]}" for rank in range(4)]


def test_mpi_by_pmix(slurm: SlurmCluster, folder: Path) -> None:
    probe = slurm.start("srun", "--mpi=pmix", "true", cwd=folder)
    if probe.wait(SECONDS):
        assert probe.stderr is not None
        pytest.skip(f"this Slurm has no PMIx: {probe.stderr.readline().strip()}")
    (folder / "train.py").write_text(
        "import tensorflow as tf, horovod.tensorflow as hvd\nhvd.init()\n"
        "total = hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy()\n"
        "print(hvd.rank(), hvd.size(), hvd.local_size(), total, hvd.mpi_enabled())\n"
    )
    job = slurm.start(
        *("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", *HVDTRAIN, "run"),
        *("--controller", "mpi", "--all-ranks", "train.py"),
        cwd=folder,
    )
    stdout, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, stderr
    assert sorted(stdout.splitlines()) == ["[0] 0 2 1 [2.] True", "[1] 1 2 1 [2.] True"]


def test_the_scripts_to_copy(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "train.py").write_text(
        RANK + "print('rank', rank, os.environ['HOROVOD_SIZE'], sys.argv[1:], flush=True)\n"
    )
    jobs = {}
    for name in ("hvdtrain_run", "horovodrun"):
        script = str(SCRIPTS / f"{name}.sbatch")
        jobs[name] = slurm.run(
            "sbatch", "--parsable", script, "train.py", "--x", cwd=folder
        ).strip()
    for name, job_id in jobs.items():
        slurm.wait_for(job_id, "COMPLETED", "FAILED")
        said = (folder / f"train-{job_id}.out").read_text()
        shown = [line for line in said.splitlines() if "rank" in line]
        expected = (
            1 if name == "hvdtrain_run" else 4
        )  # horovodrun shows all ranks, with their tags.
        assert len(shown) == expected, said
        assert all("4 ['--x']" in line for line in shown)


def test_a_sweep(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "train.py").write_text(
        RANK + "open(f'{sys.argv[2]}.{rank}', 'w').close()\n"
        "if sys.argv[2] == '1e-3':\n    sys.exit(7 if rank else 0)\n"
    )
    job = slurm.run("sbatch", "--parsable", str(SCRIPTS / "sweep.sbatch"), "train.py", cwd=folder)
    deadline = time.monotonic() + SECONDS
    while slurm.run("squeue", "--noheader") and time.monotonic() < deadline:
        time.sleep(0.3)
    rates = ("3e-4", "1e-3", "3e-3", "1e-2")
    assert sorted(path.name for path in folder.glob("*e-*.?")) == sorted(
        f"{rate}.{rank}" for rate in rates for rank in (0, 1)
    )
    said = (folder / f"sweep-{job.strip()}_1.out").read_text()
    assert "rank 1 ended with exit code 7" in said


def test_an_array_is_waited_for(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "train.py").write_text(
        "import os, sys\nsys.exit(3 * int(os.environ['SLURM_ARRAY_TASK_ID']))\n"
    )
    arguments = ("--array", "0-1", "--tasks-per-node", "1", "train.py")
    job = slurm.start(*HVDTRAIN, "submit", "--wait", *arguments, cwd=folder)
    stdout, stderr = job.communicate(timeout=SECONDS)
    job_id = stdout.strip()
    assert job.returncode == 3
    assert f"job {job_id}_0: completed\n" in stderr
    assert f"job {job_id}_1: failed, exit code 3\n" in stderr
