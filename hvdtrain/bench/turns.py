"""Jobs that train in turns: the speed of shared machines varies, and so it does for all of them alike.

A job is a process, or several ranks of this machine, started once. Its processes are connected to this one by sockets.
A turn is a number of steps, sent to each; the answer of rank 0 holds the seconds of its steps. Between turns a job
waits, with Horovod shut down, and takes nothing from the cores. When one side ends, the other sees the end of the
connection, and ends too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hvdtrain.bench.measurement import TIMEOUT_SECONDS, Launch, run_script
from hvdtrain.errors import EngineError
from hvdtrain.launch.running.timed_command import end_all
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

    if is_rank(os.environ) and os.environ.get(CONTROLLER) != "gloo":
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
    """Train the turns of a job, as one of its processes: the main program of the job's script.

    Args:
        build: Function of the job's options.
    """
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
    """A running job; see `in_turns`."""

    def __init__(self, ranks: list[socket.socket], ended: Future[None], name: str) -> None:
        self._ranks, self._ended, self._name = ranks, ended, name
        self._answers = [rank.makefile() for rank in ranks]
        self.steps = 1
        # As many as take SECONDS; the first turn traces.
        for _ in range(3):
            (turn,) = take_turns(self)
            self.steps = max(2, round(self.steps * SECONDS / sum(turn.seconds)))

    def end(self) -> None:
        """End the job."""
        for answers, rank in zip(self._answers, self._ranks, strict=True):
            answers.close()
            rank.close()
        wait([self._ended], _ENDING_SECONDS)

    def begin(self) -> None:
        """Let the job train a turn."""
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # It has ended: its answer says so.
                _tell(rank, self.steps)

    def finish(self) -> Turn:
        """Wait for the end of the turn.

        Raises:
            EngineError: The job has ended, or its turn takes longer than TIMEOUT_SECONDS.
        """
        found, *_ = [self._answer(lines) for lines in self._answers]
        return Turn(tuple(found["seconds"]), found["examples"], found["loss"])

    def _answer(self, lines: TextIO) -> dict[str, Any]:
        try:
            line = lines.readline()
        except TimeoutError:
            raise EngineError(
                f"A turn took longer than {TIMEOUT_SECONDS:.0f} s: {self._name}"
            ) from None
        except ConnectionError:
            line = ""
        if not line:
            _raise_end(self._ended, self._name)
        return dict(json.loads(line))


def take_turns(*jobs: Job) -> list[Turn]:
    """Let the jobs train a turn, all at the same time, and return what they measured."""
    for job in jobs:
        job.begin()
    return [job.finish() for job in jobs]


Start = Callable[..., Job]
"""Function that starts a job; see `in_turns`."""


@contextlib.contextmanager
def in_turns() -> Iterator[Start]:
    """Yield a function that starts a job, and returns when it trains as fast as it can; end all jobs on exit.

    Its arguments are those of `run_measurement`, for a script that calls `serve`.
    """
    running: list[Future[None]] = []
    with ThreadPoolExecutor(_MOST_JOBS) as threads, contextlib.ExitStack() as jobs:

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
                server.bind(address)
                server.listen(np)
                arguments = (json.dumps(options), address)
                ended = threads.submit(
                    run_script, launch, np, script, arguments, environment, _DAY_SECONDS
                )
                running.append(ended)
                name = f"{script.name} {arguments[0]}"
                job = Job(_connect(server, np, ended, name), ended, name)
            jobs.callback(job.end)
            return job

        try:
            yield start
        except BaseException:
            end_all()  # Otherwise the threads wait for them.
            raise
        jobs.close()
        if wait(running, _ENDING_SECONDS).not_done:
            end_all()


def _raise_end(ended: Future[None], name: str) -> NoReturn:
    """Raise what has ended a job."""
    with contextlib.suppress(TimeoutError):  # A launcher may take a while to end its other ranks.
        ended.result(_ENDING_SECONDS)
    raise EngineError(f"A process ended before the measurement: {name}")


def _connect(server: socket.socket, np: int, ended: Future[None], name: str) -> list[socket.socket]:
    """Return connections to the processes of a job, by rank."""
    server.settimeout(_POLL_SECONDS)
    limit = time.monotonic() + TIMEOUT_SECONDS
    found: dict[int, socket.socket] = {}
    while len(found) < np:
        if ended.done():
            _raise_end(ended, name)
        if time.monotonic() > limit:
            raise EngineError(f"{name} did not begin to train within {TIMEOUT_SECONDS:.0f} s")
        with contextlib.suppress(TimeoutError):
            connection, _ = server.accept()
            connection.settimeout(TIMEOUT_SECONDS)
            with connection.makefile() as lines:
                found[json.loads(lines.readline())["rank"]] = connection
    return [found[rank] for rank in range(np)]
