"""Elastic jobs over ssh: a host that cannot run ranks is left out, and nobody else in the network runs code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import keras
import numpy as np
import pytest
from jobs import RANK, REPOSITORY, user_environment
from namespaces import NamespaceHost, child_of

from hvdtrain.launch.running.run_status import read_status

Hosts = dict[str, NamespaceHost]
SECONDS = 60

# Ranks without TensorFlow: they tell the launcher of themselves as Horovod's do, and stay until they are warned.
STAY = (
    RANK
    + """
import json
from horovod.common.elastic import notification_manager
from hvdtrain.worker.preemption_notice import warned
notification_manager.init()
name = os.environ["HOROVOD_HOSTNAME"]
with open(f"{name}.part", "w") as file:
    json.dump(dict(os.environ), file)
os.rename(f"{name}.part", f"{name}.rank")
while not warned():
    time.sleep(0.05)
"""
)

# PUTs a pickle that makes the file of its second argument.
EXPLOIT = """
import base64, os, pickle, sys, urllib.error, urllib.request
class Exploit:
    def __reduce__(self):
        return os.system, ("touch " + sys.argv[2],)
body = base64.b64encode(pickle.dumps(Exploit()))
try:
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, method="PUT"), timeout=5)
except urllib.error.HTTPError as error:
    print(error.code)
"""


# The first worker trains until there is a second, which takes longer to start than Gloo waits.
SLOW = """
import os, time
if os.environ["HOROVOD_HOSTNAME"] == "node2":
    time.sleep(8)
import keras
import hvdtrain.keras as hvd
hvd.init()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
@hvd.elastic.run
def train(state):
    open(f"{os.environ['HOROVOD_HOSTNAME']}.trains", "w").close()
    while hvd.size() < 2:
        time.sleep(0.1)
        state.commit()
    return hvd.allgather_object(os.environ["HOROVOD_HOSTNAME"])
print("trained on", *train(hvd.elastic.KerasState(model)))
"""
# Ranks without TensorFlow, which meet as Horovod's do. The first one on node2 hangs; node1's waits for it as after a
# collective that failed.
HANG = """
import os, time
from pathlib import Path
from hvdtrain.worker.elastic_place import place_after_arrival, place_in_job
from hvdtrain.worker.heartbeat import beat
place = place_after_arrival(os.environ)
first = not Path("again").exists()
if place["HOROVOD_SIZE"] == "2" and first:
    beat("training", 6, rank=int(place["HOROVOD_RANK"]))
    if os.environ["HOROVOD_HOSTNAME"] == "node2":
        time.sleep(1000)
    Path("again").touch()
    os.environ.update(place_in_job(os.environ))
    place = place_after_arrival(os.environ)
    while place["HOROVOD_SIZE"] != "2":  # The other one may come later.
        time.sleep(0.2)
        os.environ.update(place_in_job(os.environ))
        place = place_after_arrival(os.environ)
print("ends as rank", place["HOROVOD_RANK"], "of", place["HOROVOD_SIZE"])
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(hosts: Hosts, tmp_path: Path) -> Iterator[Start]:
    """start(script, *hosts, after=(), **environment): an elastic job on node1, with the hosts in hosts.txt."""
    processes = []

    def begin(
        script: str, *found: str, after: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(script)
        find = tmp_path / "find.sh"
        find.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts.txt\n")
        find.chmod(0o755)
        show(tmp_path, *found)
        command = [
            str(Path(sys.executable).with_name("hvdtrain")),
            "run",
            "-np",
            "1",
            "--max-np",
            "3",
        ]
        command += ["--host-discovery-script", str(find), "--start-timeout", "5", "--all-ranks"]
        command += ["--network-interfaces", "eth0", "--env", "TOKEN", "train.py", *after]
        process = subprocess.Popen(
            hosts["node1"].argv(command, tmp_path),
            env=user_environment(HOME=str(tmp_path), TOKEN="hush-hush", **environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:  # Only a failed test leaves one.
            os.kill(child_of(process.pid), signal.SIGKILL)
            process.wait()
    assert {name: found for name, host in hosts.items() if (found := host.left(8))} == {}


def show(folder: Path, *found: str) -> None:
    """Change what the discovery prints."""
    (folder / "hosts.new").write_text("".join(f"{name}:1\n" for name in found))
    (folder / "hosts.new").rename(folder / "hosts.txt")


def told(process: subprocess.Popen[str], path: Path) -> str:
    """What a rank has written, once it has."""
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return path.read_text()


def test_a_newcomer_that_starts_slowly(start: Start, tmp_path: Path) -> None:
    job = start(SLOW, "node1", HOROVOD_GLOO_TIMEOUT_SECONDS="4")
    told(job, tmp_path / "node1.trains")
    show(tmp_path, "node1", "node2")
    stdout, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, stderr
    assert "trained on node1 node2" in stdout
    assert "Wait timeout" not in stderr


def test_hosts_that_come_and_a_stranger(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    job = start(STAY, "node1", "nowhere")
    environ = json.loads(told(job, tmp_path / "node1.rank"))
    assert environ["TOKEN"] == "hush-hush"
    place = f"{environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
    assert place.startswith(f"{hosts['node1'].address}:")

    url = f"http://{place}/worker_addresses/node1:0"
    ran = tmp_path / "ran"
    assert hosts["node2"].run(sys.executable, "-c", EXPLOIT, url, str(ran)).stdout == "403\n"

    show(tmp_path, "node1", "nowhere", "node2")
    deadline = time.monotonic() + SECONDS
    while not any("hvdtrain.start.agent" in line for line in hosts["node2"].left()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert hosts["node1"].listeners() == set()
    shown = [line for host in hosts.values() for line in host.left() if "hush" in line]
    assert shown == []

    os.kill(child_of(job.pid), signal.SIGUSR1)
    _, stderr = job.communicate(timeout=SECONDS)
    assert (job.returncode, ran.exists()) == (0, False)
    assert (
        f"hvdtrain: refused PUT /worker_addresses/node1:0 from {hosts['node2'].address}: " in stderr
    )
    assert stderr.count("host nowhere is skipped until it can run workers") == 1


def test_a_rank_that_hangs_on_another_host(start: Start, tmp_path: Path) -> None:
    job = start(HANG, "node1", "node2", HVDTRAIN_HANG_TIMEOUT="6")
    deadline = time.monotonic() + SECONDS
    seen = (0, 0)
    while seen != (2, 7):  # `hvdtrain ps` reads it there.
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)
        for status in map(read_status, tmp_path.glob(".hvdtrain/logs/*")):
            seen = (status.ranks, status.step) if status else seen
    stdout, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, stderr
    waited = (
        r"on host node2 \(process \d+\) is missing: others have waited 6 s for it in hvdtrain.init"
    )
    assert re.search(rf"rank \d {waited}", stderr)
    assert "local rank 0 of host node2 failed and is being restarted" in stderr
    ended = {line.partition(" ")[2] for line in stdout.splitlines()}
    assert {f"ends as rank {n} of 2" for n in range(2)} <= ended


def end_broken_connections(host: NamespaceHost) -> None:
    """End what sshd has left of them: it notices one when it next sends something, which may take minutes."""
    deadline = time.monotonic() + 8
    while True:
        left = {pid: line for pid, line in host.processes().items() if pid not in host.quiet}
        if all(line.startswith("sshd: ") for line in left.values()):
            break
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_trainer_outlives_its_hosts(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    """One worker is killed, a host comes, one is cut off; the weights are those of the undisturbed run."""
    script = (REPOSITORY / "tests" / "ranks" / "elastic_trainer.py").read_text()
    job = start(script, "node1", "nowhere", "node2", after=(str(tmp_path), "0.3"))
    events = tmp_path / "events"

    def when(what: Callable[[dict[str, int]], bool]) -> None:
        deadline = time.monotonic() + 2 * SECONDS
        while not events.exists() or not any(
            map(what, map(json.loads, events.read_text().splitlines()))
        ):
            assert time.monotonic() < deadline
            assert job.poll() is None, job.communicate()
            time.sleep(0.1)

    when(lambda one: one["step"] >= 9)
    show(tmp_path, "node1", "nowhere", "node2", "node3")
    when(lambda one: one["size"] == 3)
    hosts["node2"].run("ip", "link", "set", "eth0", "down")
    try:
        alone = tmp_path / "alone"
        alone.mkdir()
        plain = [sys.executable, str(tmp_path / "train.py"), str(alone), "0"]
        subprocess.run(plain, env=user_environment(), check=True, timeout=SECONDS)
        _, stderr = job.communicate(timeout=2 * SECONDS)
    finally:
        hosts["node2"].run("ip", "link", "set", "eth0", "up")
    assert job.returncode == 0, stderr
    end_broken_connections(hosts["node2"])
    first = [
        one["step"] for one in map(json.loads, events.read_text().splitlines()) if not one["rank"]
    ]
    assert sorted(set(first)) == list(range(30))
    # A checkpoint every two steps: a failure loses one at most, and its own. A host that comes costs none.
    assert len(first) <= 30 + 2 * 2
    before, after = (
        keras.models.load_model(run / "run" / "model.keras") for run in (alone, tmp_path)
    )
    for one, same in zip(before.get_weights(), after.get_weights(), strict=True):
        # Sums of float32 in another order.
        np.testing.assert_allclose(same, one, rtol=1e-5, atol=1e-6)
