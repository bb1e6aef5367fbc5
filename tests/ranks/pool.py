"""Ranks that stay: started once a session for each number and controller, they take one case after another.

The test process and the ranks talk through a folder: job 7 is `job7.json`, what rank 1 returned `job7.rank1.json`.
Ranks that wait are stopped (SIGSTOP): Horovod's threads would go on asking each other every millisecond. A case that
raises or hangs ends its pool, so that it cannot disturb the next one, which gets new ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import results

MOST_RANKS = 8
"""In memory at a time, of 0.8 GB each."""
RUNNER = Path(__file__).with_name("run_cases.py")
START_SECONDS = 180
"""Until all ranks have imported TensorFlow, on a busy machine."""
_PR_SET_PDEATHSIG = 1


class Pool:
    """`np` ranks of one controller, in one environment."""

    def __init__(
        self, command: list[str], np: int, environment: Mapping[str, str], references: Path
    ) -> None:
        """Start the ranks.

        Args:
            command: launches what follows it on all ranks.
            np: how many.
            environment: of the ranks.
            references: the folder of the session's references.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="hvdtrain-pool-"))
        self._references = references
        self.np, self._jobs = np, 0
        self._output = (self._folder / "output").open("w+", errors="replace")
        prctl = ctypes.CDLL(None).prctl
        self._launcher = subprocess.Popen(
            [*command, sys.executable, str(RUNNER), str(self._folder), str(references)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A launcher that is told to end ends its ranks, stopped ones as well.
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    def run(
        self, job: dict[str, Any], timeout: float
    ) -> tuple[list[dict[str, Any]], str, str | None]:
        """Run one case on all ranks.

        Returns:
            What each rank returned ({} if it did not get there), what the ranks printed meanwhile, and if the pool
            can take no other case why not.
        """
        begin = self._output.seek(0, os.SEEK_END)
        number, self._jobs = self._jobs, self._jobs + 1
        paths = [self._folder / f"job{number}.rank{rank}.json" for rank in range(self.np)]
        self._signal(signal.SIGCONT)
        results.write(self._folder / f"job{number}.json", job)
        end = time.monotonic() + timeout + (0 if number else START_SECONDS)
        while not all(path.exists() for path in paths) and self._launcher.poll() is None:
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        ended = self._launcher.poll()
        found = [self._read(path) for path in paths]
        broken = None
        if ended is not None:
            broken = f"the ranks ended with exit code {ended}"
        elif not all(found):
            broken = f"still running after {timeout:.0f} s"
        elif any("error" in one for one in found):
            broken = "an error"
        if broken:
            # What is printed last is the reason.
            self.close(keep=True)
        else:
            self._signal(signal.SIGSTOP)
        self._output.seek(begin)
        printed = self._output.read()
        if broken:
            self._discard()
        return found, printed, broken

    def close(self, keep: bool = False) -> None:
        """End the ranks; `keep` their output."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(2)
        end_family(self._launcher)
        if not keep:
            self._discard()

    def _discard(self) -> None:
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, path: Path) -> dict[str, Any]:
        return results.read(path, self._references) if path.exists() else {}

    def _signal(self, number: signal.Signals) -> None:
        if self._launcher.poll() is not None:
            return
        for path in self._folder.glob("*.pid"):
            try:
                os.kill(int(path.read_text()), number)
            except ProcessLookupError:
                continue


def end_family(job: subprocess.Popen[Any]) -> None:
    """End a job with everything that it started."""
    if job.poll() is not None:
        return
    family = psutil.Process(job.pid).children(recursive=True)
    job.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=5)
    for process in alive:
        process.kill()
    job.kill()
    job.wait()


class Pools:
    """The pools of a session, and its references."""

    def __init__(self) -> None:
        self.references = Path(tempfile.mkdtemp(prefix="hvdtrain-references-"))
        # The last one used is the last.
        self._pools: dict[tuple[str, ...], Pool] = {}

    def run(
        self,
        command: list[str],
        np: int,
        environment: Mapping[str, str],
        job: dict[str, Any],
        timeout: float,
    ) -> tuple[list[dict[str, Any]], str, str | None]:
        """Run a case in the pool of this command and environment, which starts if there is none; see Pool.run."""
        key = (*command, *(f"{name}={value}" for name, value in sorted(environment.items())))
        pool = self._pools.pop(key, None)
        if pool is None:
            while self._pools and np + sum(p.np for p in self._pools.values()) > MOST_RANKS:
                self._pools.pop(next(iter(self._pools))).close()
            pool = Pool(command, np, environment, self.references)
        self._pools[key] = pool
        done = pool.run(job, timeout)
        if done[-1]:
            del self._pools[key]
        return done

    def close(self) -> None:
        """End all ranks, and forget the references."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        shutil.rmtree(self.references, ignore_errors=True)
