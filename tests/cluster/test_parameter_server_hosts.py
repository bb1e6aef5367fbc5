"""Chief, workers and servers over several hosts: by ssh, and in a Slurm job by srun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import REPOSITORY, SECONDS
from namespaces import NamespaceHost
from slurm_cluster import SlurmCluster
from test_ssh_hosts import END_SECONDS, Hosts, Launch, left
from test_ssh_hosts import launch as launch

SERVE = "-P -m hvdtrain.start.tf_server"
# Both workers add to a variable of the server's, asynchronously; each also answers itself.
TRAIN = """
import os, time
from pathlib import Path
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = tf.Variable(tf.zeros([]))
@tf.function
def step():
    total.assign_add(1.0)
for _ in range(20):
    coordinator.schedule(step)
coordinator.join()
for index in range(2):
    with tf.device(f"/job:worker/replica:0/task:{index}"):
        assert f"task:{index}" in tf.add(total.read_value(), 1.0).device
print("total", float(total), os.environ["HVDTRAIN_STRATEGY"], flush=True)
Path("trained").touch()
while not Path("go").exists():
    time.sleep(0.05)
"""
# Without TensorFlow, in the place of workers and servers; deaf to SIGTERM.
STAND_IN = f"""
import sys
if sys.orig_argv[1:4] == {SERVE.split()!r}:
    import json, os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    open(f"started.{{task['type']}}{{task['index']}}.{{os.environ.get('WANTED_TOKEN')}}", "w").close()
    time.sleep(600)
"""
WAIT = """
import os, time
with open('started.part', 'w') as file:
    file.write(os.environ["TF_CONFIG"])
os.rename('started.part', 'started.chief')
while not os.path.exists('lost'):
    time.sleep(0.05)
raise OSError("a server has gone")
"""
TWO_AND_ONE = ("--strategy", "parameter-server", "--workers", "2", "--ps", "1")


def servers_on(hosts: Sequence[NamespaceHost]) -> list[int]:
    """How many workers and servers run on each host."""
    return [sum(SERVE in line for line in host.left()) for host in hosts]


def wait_for(folder: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, list(folder.rglob("*"))
        time.sleep(0.05)


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """PYTHONPATH with stand-ins."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    (tmp_path / "train.py").write_text(WAIT)
    return f"{tmp_path / 'site'}{os.pathsep}{REPOSITORY}"


def test_workers_on_two_hosts_train(launch: Launch, hosts: Hosts, tmp_path: Path) -> None:
    """The server is on the first host, then come a worker on the second and one on the first."""
    (tmp_path / "train.py").write_text(TRAIN)
    job = launch(*TWO_AND_ONE, "-H", "node1:2,node2:2", "--log-dir", "logs", "train.py")
    wait_for(tmp_path, "trained", 1)
    assert servers_on([hosts["node1"], hosts["node2"]]) == [2, 1]
    (tmp_path / "go").touch()
    stdout, stderr = job.end()
    assert (job.process.returncode, stdout) == (0, "total 20.0 parameter-server\n"), stderr
    assert left(hosts, END_SECONDS) == {}
    assert (tmp_path / "logs" / "chief" / "stdout").read_text() == stdout


def test_ctrl_c_and_sigkill_leave_nothing_on_any_host(
    launch: Launch, hosts: Hosts, tmp_path: Path, stand_in: str
) -> None:
    secret = {"WANTED_TOKEN": "token-2", "TF_SECRET": "token-3", "PYTHONPATH": stand_in}
    options = (*TWO_AND_ONE, "-H", "node1:1,node2:2", "--env", "WANTED_TOKEN", "train.py")
    for number in (signal.SIGINT, signal.SIGKILL):
        job = launch(*options, **secret)
        wait_for(tmp_path, "started.*.token-2", 3)
        wait_for(tmp_path, "started.chief", 1)
        lines = [line for host in hosts.values() for line in host.left()]
        assert any("ssh" in line for line in lines)
        assert not any("token-" in line for line in lines)
        os.kill(job.pid, number)
        asked = time.monotonic()
        job.end()
        assert left(hosts, END_SECONDS) == {}
        assert time.monotonic() - asked < (5 if number == signal.SIGINT else END_SECONDS)
        for path in tmp_path.glob("started.*"):
            path.unlink()


def test_hosts_that_cannot_be_used(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    named = "nowhere:1,locked:1,bare:1"
    job = launch(*TWO_AND_ONE, "-H", named, "--start-timeout", "8", "train.py")
    stdout, stderr = job.end()
    assert (job.process.returncode, stdout) == (1, "")
    for host, why in (
        ("nowhere", "it cannot be reached"),
        ("locked", "it refuses your ssh key"),
        ("bare", f"there is no Python at {sys.executable}"),
    ):
        assert stderr.count(f"host {host}: {why}") == 1, stderr
    assert not (tmp_path / "started").exists()


def test_a_server_on_another_host_dies(
    launch: Launch, hosts: Hosts, tmp_path: Path, stand_in: str
) -> None:
    """All but the chief are there, and find it where ssh came from."""
    job = launch(*TWO_AND_ONE, "-H", "node2:3", "train.py", PYTHONPATH=stand_in)
    wait_for(tmp_path, "started.*.*", 3)
    wait_for(tmp_path, "started.chief", 1)
    cluster = json.loads((tmp_path / "started.chief").read_text())["cluster"]
    found = {kind: {one.partition(":")[0] for one in all_of} for kind, all_of in cluster.items()}
    chief = hosts["node1"].address
    assert found == {"chief": {chief}, "worker": {"node2"}, "ps": {"node2"}}
    killed = time.monotonic()
    for pid in hosts["node2"].processes():
        with contextlib.suppress(OSError):
            if b'"ps", "index": 0' in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)
    (tmp_path / "lost").touch()
    _, stderr = job.end()
    assert time.monotonic() - killed < 8
    assert job.process.returncode == 1
    assert stderr.lstrip().startswith("ps-0 on host node2 was killed by SIGKILL"), stderr
    assert left(hosts, END_SECONDS) == {}


def test_a_slurm_job_of_two_nodes(slurm: SlurmCluster, tmp_path: Path, stand_in: str) -> None:
    """As over ssh; afterwards scancel of a second job leaves nothing."""
    (tmp_path / "train.py").write_text(TRAIN)
    hvdtrain = (sys.executable, "-m", "hvdtrain.cli", "submit", "--nodes", "2", "--time", "5")
    options = (*hvdtrain, *TWO_AND_ONE)
    job = slurm.start(*options, "--wait", "train.py", cwd=tmp_path)
    try:
        wait_for(tmp_path, "trained", 1)
        assert servers_on(slurm.hosts) == [2, 1]
        (tmp_path / "go").touch()
        stdout, stderr = job.communicate(timeout=SECONDS)
        assert job.returncode == 0, stderr
        assert stdout.splitlines()[1:] == ["total 20.0 parameter-server"]
        assert slurm.left(seconds=10) == []
        (tmp_path / "train.py").write_text(WAIT)
        job_id = slurm.run(*options, "train.py", cwd=tmp_path, PYTHONPATH=stand_in).strip()
        wait_for(tmp_path, "started.*.*", 3)
        assert servers_on(slurm.hosts) == [2, 1]
        slurm.run("scancel", job_id)
        assert slurm.left(seconds=15) == []
    finally:
        job.kill()
        slurm.cancel_all()
