"""Which programs of a running job listen on every interface of their host: none that we could bind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import SECONDS, user_environment
from namespaces import NamespaceHost, child_of

Hosts = dict[str, NamespaceHost]
TRAIN = """
import sys, time
import horovod.tensorflow as hvd
hvd.init()
open(f"ready.{hvd.rank()}", "w").close()
time.sleep(600)
"""
# The chief of TensorFlow's servers, which are up once a worker has computed something.
SERVE = """
import time
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
coordinator.schedule(tf.function(lambda: tf.constant(1)))
coordinator.join()
for name in "ab":
    open(f"ready.{name}", "w").close()
time.sleep(600)
"""
MPIRUN = {"mpirun", "orterun", "orterun_wrapper", "orted"}
"""Open MPI's own daemons have no option for this. Over several hosts its ranks have none either."""

CASES = {
    "Gloo here": (TRAIN, ["-np", "2", "--controller", "gloo"], set()),
    "MPI here": (TRAIN, ["-np", "2", "--controller", "mpi"], MPIRUN),
    "Gloo over ssh": (TRAIN, ["-H", "node1:1,node2:1", "--controller", "gloo"], set()),
    "MPI over ssh": (
        TRAIN,
        ["-H", "node1:1,node2:1", "--controller", "mpi"],
        MPIRUN | {"hvdtrain.worker"},
    ),
    "elastic": (TRAIN, ["-H", "node1:1,node2:1", "-np", "2", "--min-np", "2"], set()),
    # TensorFlow's servers have no option for this: docs/security.md.
    "parameter servers": (
        SERVE,
        ["--strategy", "parameter-server", "--workers", "1", "--ps", "1", "-H", "node1:1,node2:1"],
        {"hvdtrain.worker", "hvdtrain.start.tf_server"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_listens_everywhere(hosts: Hosts, tmp_path: Path, case: str) -> None:
    script, options, allowed = CASES[case]
    (tmp_path / "train.py").write_text(script)
    program = str(Path(sys.executable).with_name("hvdtrain"))
    job = subprocess.Popen(
        hosts["node1"].argv([program, "run", *options, "train.py"], tmp_path),
        env=user_environment(HOME=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while len(list(tmp_path.glob("ready.*"))) < 2:
            assert time.monotonic() < deadline
            assert job.poll() is None, job.communicate()
            time.sleep(0.1)
        found = {name: host.listeners() for name, host in hosts.items()}
    finally:
        os.kill(child_of(job.pid), signal.SIGTERM)
        job.communicate(timeout=SECONDS)
    # The look at the host sees what there is.
    assert bool(found["node1"] & allowed) == bool(allowed)
    assert {name: more for name, programs in found.items() if (more := programs - allowed)} == {}
