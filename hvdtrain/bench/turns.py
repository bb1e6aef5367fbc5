"""Jobs that train in turns: a shared machine has another speed from minute to minute, but the same for all of these.

A job is a process, or several ranks of this machine, started once. Its processes are connected to this one by sockets.
A turn is a number of steps, sent to each; the answer of rank 0 holds the seconds of its steps. Between turns a job
waits, with Horovod shut down, and takes nothing from the cores. When one side ends, the other sees the end of the
connection, and ends too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any, NoReturn, TextIO

from hvdtrain.bench.measurement import TIMEOUT_SECONDS, Launch, run_script
from hvdtrain.errors import EngineError, UsageError
from hvdtrain.launch.running.processes import signal_launch
from hvdtrain.launch.running.timed_command import new_mark
from hvdtrain.rank_variables import CONTROLLER, is_rank

SECONDS = 2.0
"""Target duration of a turn."""
WARM_UP = 2
"""Number of steps of a turn that are not timed, as Horovod has just started."""
_MOST_JOBS = 1000
_ENDING_SECONDS = 30.0
_DAY_SECONDS = 86_400.0
_POLL_SECONDS = 0.2


def keep_mpi() -> None:
    """Let mpi4py start MPI, if this is a rank over MPI: Horovod ends what it has started, and cannot start it again."""
    import tensorflow  # noqa: F401  (before mpi4py: see runtime.py)

    if not is_rank(os.environ) or os.environ.get(CONTROLLER) == "gloo":
        return
    if importlib.util.find_spec("mpi4py") is None:
        sys.exit(
            "This needs mpi4py over MPI: pip install 'hvdtrain[mpi]', or pass --controller gloo"
        )
    import mpi4py.MPI  # noqa: F401


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Training:
    """What a process of a job trains.

    Attributes:
        step: Function that trains a step and returns the loss.
        rank: Rank of the process in its job.
        examples: Number of examples per step, over all ranks.
        resume: Function to call before a turn.
        pause: Function to call after a turn; also before the first one.
    """

    step: Callable[[], float]
    rank: int
    examples: int
    resume: Callable[[], object] = _nothing
    pause: Callable[[], object] = _nothing


@dataclass(frozen=True)
class Turn:
    """A turn of a job.

    Attributes:
        seconds: Duration of each step on rank 0.
        examples: Number of examples per step, over all ranks.
        loss: Loss of the last step on rank 0.
    """

    seconds: tuple[float, ...]
    examples: int
    loss: float = math.nan

    @property
    def rate(self) -> float:
        """Examples per second."""
        return self.examples / self.step_seconds

    @property
    def step_seconds(self) -> float:
        """Mean duration of a step."""
        return sum(self.seconds) / len(self.seconds)


def serve(build: Callable[..., Training]) -> None:
    """Train the turns of a job, which `build` makes of its options, as one of its processes: the main of a script."""
    options, address = sys.argv[1:]
    training = build(**json.loads(options))
    training.pause()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile() as turns:
            _tell(connection, {"rank": training.rank})
            for line in turns:
                training.resume()
                for _ in range(WARM_UP):
                    training.step()
                seconds, loss = [], math.nan
                for _ in range(int(line)):
                    begin = time.perf_counter()
                    loss = training.step()
                    seconds.append(time.perf_counter() - begin)
                training.pause()
                _tell(connection, {"seconds": seconds, "examples": training.examples, "loss": loss})


def _tell(connection: socket.socket, message: object) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


class Job:
    """A running job; see `in_turns`.

    Attributes:
        steps: Number of steps of its turns, alone or as the first of several jobs.
        ended: What has become of its processes.
    """

    def __init__(self, name: str, mark: str, ended: Future[None]) -> None:
        self._name, self._mark, self.ended = name, mark, ended
        self._ranks: dict[int, tuple[socket.socket, TextIO]] = {}
        self.steps = 1

    def connect(self, server: socket.socket, np: int) -> None:
        """Wait until `np` processes have built what they train."""
        server.settimeout(_POLL_SECONDS)
        limit = time.monotonic() + TIMEOUT_SECONDS
        while len(self._ranks) < np:
            if self.ended.done():
                self._raise_end()
            if time.monotonic() > limit:
                raise EngineError(
                    f"It did not begin to train within {TIMEOUT_SECONDS:.0f} s: {self._name}"
                )
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                connection.settimeout(TIMEOUT_SECONDS)
                lines = connection.makefile()
                rank = self._heard(lines)["rank"]
                if rank in self._ranks:
                    raise EngineError(
                        f"Two processes are rank {rank}, and not one job: {self._name}"
                    )
                self._ranks[rank] = connection, lines

    def calibrate(self) -> None:
        """Choose as many steps for a turn as take SECONDS."""
        for _ in range(3):
            (turn,) = take_turns(self)
            self.steps = max(2, round(self.steps * SECONDS / sum(turn.seconds)))

    def begin(self, steps: int) -> None:
        """Let the job train a turn of so many steps."""
        for connection, _ in self._ranks.values():
            with contextlib.suppress(ConnectionError):  # It has ended: its answer says so.
                _tell(connection, steps)

    def finish(self) -> Turn:
        """Wait for the end of the turn.

        Raises:
            EngineError: A process has ended, or the turn takes longer than TIMEOUT_SECONDS.
        """
        limit = time.monotonic() + TIMEOUT_SECONDS
        found: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as answers:
            for rank, (connection, _) in self._ranks.items():
                answers.register(connection, selectors.EVENT_READ, rank)
            while answers.get_map():
                ready = answers.select(max(0.0, limit - time.monotonic()))
                if not ready:
                    raise EngineError(
                        f"A turn took longer than {TIMEOUT_SECONDS:.0f} s: {self._name}"
                    )
                for key, _ in ready:
                    answers.unregister(key.fileobj)
                    found[key.data] = self._heard(self._ranks[key.data][1])
        return Turn(tuple(found[0]["seconds"]), found[0]["examples"], found[0]["loss"])

    def close(self) -> None:
        """Close the connections, whereupon the processes end."""
        for connection, lines in self._ranks.values():
            lines.close()
            connection.close()

    def kill(self) -> None:
        """Kill all processes of the job."""
        self.close()
        signal_launch(self._mark, SIGKILL)

    def _heard(self, lines: TextIO) -> dict[str, Any]:
        """Return the next message of a process."""
        line = ""
        with contextlib.suppress(ConnectionError, TimeoutError):
            line = lines.readline()
        if not line:
            self._raise_end()
        return dict(json.loads(line))

    def _raise_end(self) -> NoReturn:
        with contextlib.suppress(TimeoutError):  # A launcher may take a while to end its ranks.
            self.ended.result(_ENDING_SECONDS)
        raise EngineError(f"A process ended before the end of the measurement: {self._name}")


def take_turns(*jobs: Job) -> list[Turn]:
    """Let the jobs train a turn, all at the same time and as many steps as the first, and return what they measured.

    Raises:
        EngineError: One of them failed; they have been ended, so that nothing computes beside the others.
    """
    for job in jobs:
        job.begin(jobs[0].steps)
    try:
        return [job.finish() for job in jobs]
    except EngineError:
        for job in jobs:
            job.kill()
        raise


def end(jobs: Iterable[Job]) -> None:
    """End jobs, and kill those that do not end within _ENDING_SECONDS."""
    jobs = list(jobs)
    for job in jobs:
        job.close()
    late = wait([job.ended for job in jobs], _ENDING_SECONDS).not_done
    for job in jobs:
        if job.ended in late:
            job.kill()


Start = Callable[..., Job]
"""Function that starts a job; see `in_turns`."""


@contextlib.contextmanager
def in_turns() -> Iterator[Start]:
    """Yield a function that starts a job, and returns when it trains as fast as it can; end all jobs on exit.

    Its arguments are those of `run_measurement`, except for the limit, for a script that calls `serve`.
    """
    jobs: list[Job] = []
    with ThreadPoolExecutor(_MOST_JOBS) as threads:

        def start(
            launch: Launch,
            np: int,
            script: Path,
            options: Mapping[str, object],
            environment: Mapping[str, str] | None = None,
        ) -> Job:
            with (
                tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder,
                socket.socket(socket.AF_UNIX) as server,
            ):
                address = str(Path(folder, "turns"))
                try:
                    server.bind(address)
                except OSError as error:
                    raise UsageError(
                        f"Cannot make the socket {address}: {error}. Set TMPDIR to a short path of a local folder"
                    ) from None
                server.listen(np)
                mark, arguments = new_mark(), (json.dumps(options), address)
                ended = threads.submit(
                    run_script, launch, np, script, arguments, environment, _DAY_SECONDS, mark
                )
                job = Job(f"{script.name} {arguments[0]}", mark, ended)
                jobs.append(job)
                try:
                    job.connect(server, np)
                    job.calibrate()
                except BaseException:
                    job.kill()  # It may be computing, beside those that come next.
                    raise
            return job

        try:
            yield start
        except BaseException:
            for job in jobs:
                job.kill()
            raise
        finally:
            end(jobs)
