"""Start a chief, workers and parameter servers as processes of this machine, by TF_CONFIG alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import ENVIRONMENT, ROOT

SERVE = ("-m", "hvdtrain.start.tf_server")


@dataclass
class ServerJob:
    """Processes by kind and number; the chief is ("chief", 0)."""

    folder: Path
    cluster: dict[str, list[str]]
    processes: dict[tuple[str, int], subprocess.Popen[bytes]]

    def start(self, kind: str, index: int, command: Sequence[str]) -> None:
        """Start a process, again if it was there before."""
        task = {"cluster": self.cluster, "task": {"type": kind, "index": index}}
        foreign = ("HOROVOD_", "OMPI_", "HVDTRAIN_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        with (self.folder / f"{kind}{index}.log").open("ab") as log:
            self.processes[kind, index] = subprocess.Popen(
                [sys.executable, *command],
                env=environment
                | ENVIRONMENT
                | {
                    "TF_CONFIG": json.dumps(task),
                    "PYTHONPATH": str(ROOT),
                    "HVDTRAIN_STRATEGY": "parameter-server",
                    # A server's calls from every worker, and a worker's to every server, can wait at a time.
                    "TF_NUM_INTEROP_THREADS": "4",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, kind: str, index: int = 0) -> str:
        """Return what a process printed."""
        return (self.folder / f"{kind}{index}.log").read_text(errors="replace")

    def wait_for(self, pattern: str, seconds: float = 240) -> None:
        """Wait until the chief prints something; fail the test if it does not."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.log("chief")):
            if time.monotonic() > end or self.processes["chief", 0].poll() is not None:
                pytest.fail(f"no {pattern!r} from the chief:\n{self.log('chief')}", pytrace=False)
            time.sleep(0.05)

    def end(self, kind: str = "chief", index: int = 0, seconds: float = 120) -> int:
        """Wait for the end of a process; return its exit code."""
        try:
            return self.processes[kind, index].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{kind} {index} goes on:\n{self.log(kind, index)}", pytrace=False)


@contextlib.contextmanager
def server_job(
    folder: Path, script: Sequence[str], workers: int, servers: int, by_script: int = 0
) -> Iterator[ServerJob]:
    """Run `script` as the chief of a job. The last `by_script` workers are started with the script, too."""
    addresses = iter(_free_addresses(1 + workers + servers))
    cluster = {
        "chief": [next(addresses)],
        "worker": [next(addresses) for _ in range(workers)],
        "ps": [next(addresses) for _ in range(servers)],
    }
    job = ServerJob(folder, cluster, {})
    try:
        for index in range(servers):
            job.start("ps", index, SERVE)
        for index in range(workers):
            job.start("worker", index, script if index >= workers - by_script else SERVE)
        job.start("chief", 0, script)
        yield job
    finally:
        for process in job.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def _free_addresses(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    finally:
        for one in sockets:
            one.close()
