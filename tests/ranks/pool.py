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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import results

MOST_RANKS = 6
"""In memory at a time, of 0.8 GB each."""
RUNNER = Path(__file__).with_name("run_cases.py")
START_SECONDS = 180
"""Until all ranks have imported TensorFlow, on a busy machine."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ran:
    """What became of a case.

    Args:
        found: what each rank returned; {} for one that did not get there.
        printed: by all ranks meanwhile.
        broken: why these ranks take no other case; else empty.
    """

    found: list[dict[str, Any]]
    printed: str
    broken: str


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
        self._output = self._folder / "output"
        self._references = references
        self._np, self._jobs = np, 0
        prctl = ctypes.CDLL(None).prctl
        with self._output.open("w") as output:
            self._launcher = subprocess.Popen(
                [*command, sys.executable, str(RUNNER), str(self._folder), str(references)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A launcher that is told to end ends its ranks, stopped ones as well.
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    def run(self, job: dict[str, Any], timeout: float) -> Ran:
        """Run one case on all ranks; end them if it raises on one, or takes longer than `timeout` seconds."""
        printed_before = self._output.stat().st_size
        number, self._jobs = self._jobs, self._jobs + 1
        paths = [self._folder / f"job{number}.rank{rank}.json" for rank in range(self._np)]
        self._wait_for([self._folder / f"rank{r}.pid" for r in range(self._np)], START_SECONDS)
        self._signal(signal.SIGCONT)
        results.write(self._folder / f"job{number}.json", job)
        self._wait_for(paths, timeout)
        ended = self._launcher.poll()
        found = [self._read(path) for path in paths]
        broken = ""
        if ended is not None:
            broken = f"the ranks ended with exit code {ended}"
        elif not all(found):
            broken = f"still running after {timeout:.0f} s"
        elif any("error" in one for one in found):
            broken = "an error"
        if broken:
            self._end()
        else:
            self._signal(signal.SIGSTOP)
        # What is printed last may be the reason.
        printed = self._output.read_bytes()[printed_before:].decode(errors="replace")
        if broken:
            self.close()
        return Ran(found, printed, broken)

    def close(self) -> None:
        """End the ranks."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(2)
        end_family(self._launcher)

    def _wait_for(self, paths: list[Path], seconds: float) -> None:
        """Wait until all are there, or the ranks have ended, or the time is over."""
        end = time.monotonic() + seconds
        while not all(path.exists() for path in paths) and self._launcher.poll() is None:
            if time.monotonic() > end:
                return
            time.sleep(0.01)

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


@dataclass(frozen=True)
class Kind:
    """What makes one pool differ from another: number, controller, and variables that a rank reads when it starts."""

    np: int
    controller: str
    variables: tuple[tuple[str, str], ...] = ()


class Pools:
    """The pools of a session, and its references."""

    def __init__(self, start: Callable[[Kind, Path], Pool]) -> None:
        self._start = start
        self._references = Path(tempfile.mkdtemp(prefix="hvdtrain-references-"))
        # The last one used is the last.
        self._pools: dict[Kind, Pool] = {}

    def run(self, kind: Kind, job: dict[str, Any], timeout: float) -> Ran:
        """Run a case in the pool of this kind, which starts if there is none; see Pool.run."""
        pool = self._pools.pop(kind, None)
        if pool is None:
            while self._pools and kind.np + sum(k.np for k in self._pools) > MOST_RANKS:
                self._pools.pop(next(iter(self._pools))).close()
            pool = self._start(kind, self._references)
        ran = pool.run(job, timeout)
        if not ran.broken:
            self._pools[kind] = pool
        return ran

    def close(self) -> None:
        """End all ranks, and forget the references."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        shutil.rmtree(self._references, ignore_errors=True)
