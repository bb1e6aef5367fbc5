"""Launch small scripts with `hvdtrain run`, as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from jobs import Job, user_environment
from mnist import local_weights as local_weights
from namespaces import NamespaceHost, running_hosts
from slurm_cluster import slurm as slurm


@pytest.fixture(autouse=True, scope="session")
def hangups_end_programs() -> None:
    """As in a terminal, also where nohup started the tests."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(params=["mpi", "gloo"])
def controller(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, NamespaceHost]]:
    """node1, node2 and node3 are good hosts; locked accepts no key, bare has no Python environment; the
    name `nowhere` belongs to no host."""
    with running_hosts(
        tmp_path_factory.mktemp("hosts"),
        ["node1", "node2", "node3", "locked", "bare"],
        unreachable=["nowhere"],
        locked=["locked"],
        hidden={"bare": Path(sys.prefix)},
    ) as running:
        yield running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """start(script, *options, after=(), **environment) -> Job: write the script, and launch it from its folder."""

    jobs: list[Job] = []

    def begin(script: str, *options: str, after: Sequence[str] = (), **environment: str) -> Job:
        (tmp_path / "train.py").write_text(script)
        mark = f"JOB_OF_TEST={tmp_path.name}-{os.getpid()}-{time.monotonic_ns()}"
        process = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain.cli", "run", *options, "train.py", *after],
            cwd=tmp_path,
            env=user_environment(JOB_OF_TEST=mark.partition("=")[2], **environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        jobs.append(Job(process, mark, tmp_path))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()  # Only a failed test leaves one; its guard ends the ranks.
