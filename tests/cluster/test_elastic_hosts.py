"""Elastic jobs over ssh: a host that cannot run ranks is left out, and nobody else in the network runs code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import RANK, user_environment
from namespaces import NamespaceHost, child_of

Hosts = dict[str, NamespaceHost]
SECONDS = 60

# Ranks without TensorFlow: they tell the launcher of themselves as Horovod's do, and stay until they are warned.
STAY = (
    RANK
    + """
import json
from horovod.common.elastic import notification_manager
from hvdtrain.worker.warning import warned
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


@pytest.fixture
def job(hosts: Hosts, tmp_path: Path):  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(STAY)
    (tmp_path / "hosts.txt").write_text("node1:1\nnowhere:1\n")
    find = tmp_path / "find.sh"
    find.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts.txt\n")
    find.chmod(0o755)
    command = [sys.executable, "-m", "hvdtrain.cli", "run", "-np", "1", "--max-np", "2"]
    command += ["--host-discovery-script", str(find), "--start-timeout", "5", "--all-ranks"]
    command += ["--network-interfaces", "eth0", "--env", "WANTED_TOKEN", "train.py"]
    process = subprocess.Popen(
        hosts["node1"].argv(command, tmp_path),
        env=user_environment(HOME=str(tmp_path), WANTED_TOKEN="token-2"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        os.kill(child_of(process.pid), signal.SIGKILL)
        process.wait()
    assert {name: found for name, host in hosts.items() if (found := host.left(8))} == {}


def told(process: subprocess.Popen[str], path: Path) -> dict[str, str]:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    environ: dict[str, str] = json.loads(path.read_text())
    return environ


def test_hosts_that_come_and_a_stranger(
    job: subprocess.Popen[str], hosts: Hosts, tmp_path: Path
) -> None:
    environ = told(job, tmp_path / "node1.rank")
    place = f"{environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
    assert place.startswith(f"{hosts['node1'].address}:")

    url = f"http://{place}/worker_addresses/node1:0"
    ran = tmp_path / "ran"
    assert hosts["node2"].run(sys.executable, "-c", EXPLOIT, url, str(ran)).stdout == "403\n"

    (tmp_path / "hosts.txt").write_text("node1:1\nnowhere:1\nnode2:1\n")
    deadline = time.monotonic() + SECONDS
    while not any("hvdtrain.start.agent" in line for line in hosts["node2"].left()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert hosts["node1"].listeners() == set()

    os.kill(child_of(job.pid), signal.SIGUSR1)
    _, stderr = job.communicate(timeout=SECONDS)
    assert (job.returncode, ran.exists()) == (0, False)
    assert (
        f"hvdtrain: refused PUT /worker_addresses/node1:0 from {hosts['node2'].address}: " in stderr
    )
    assert stderr.count("host nowhere is left out until it can run ranks") == 1
