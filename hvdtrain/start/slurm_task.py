"""Run one task of srun:

    srun ... python -m hvdtrain.start.slurm_task COMMAND...

sets Horovod's variables for COMMAND from Slurm's, and marks its output with the rank, as horovodrun and mpirun do.
srun's own --label breaks unfinished lines (progress bars) and lines longer than its messages.

Marks (`hvdtrain.start.parts.output_tags`) are at the beginning of lines, and no marked line is longer than what srun
forwards in one piece, so lines of several ranks never mix.

`hvdtrain.start.run_srun` ends a run by SIGURG or SIGWINCH to the tasks, which all of their processes ignore but this
one: it sends SIGINT or SIGTERM to the rank alone, not to the processes that the rank has started, such as workers that
load data. The exit code is then 0, as srun kills all tasks when one fails, also those that still save.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hvdtrain.environment import LAUNCH_ID, TERMINAL
from hvdtrain.errors import HvdtrainError
from hvdtrain.host_limits import available_cores
from hvdtrain.launch.addresses import interface_towards
from hvdtrain.launch.running.processes import Pipes, start
from hvdtrain.launch.running.rank_monitor import RankMonitor, as_json
from hvdtrain.launch.running.srun_tasks import NEWS_SECONDS
from hvdtrain.launch.slurm.task_variables import task_environment
from hvdtrain.rank_variables import GLOO_INTERFACE, RENDEZVOUS_ADDRESS
from hvdtrain.signals import outlive_signals, shell_code
from hvdtrain.standard_streams import write_all
from hvdtrain.start.parts.output_tags import LONGEST_PIECE, mark_for, marked_news
from hvdtrain.start.parts.rank_watch import LOOK_SECONDS

TICK_SECONDS = 0.1
ORDERS = {signal.SIGURG: signal.SIGINT, signal.SIGWINCH: signal.SIGTERM}
"""Signal to a task -> signal to its rank."""


def main() -> None:
    """Run the command, and exit with its exit code."""
    # Slurm signals all processes of a task; this one survives, to forward what the command then prints.
    outlive_signals()
    asked: list[int] = []
    for order in ORDERS:
        signal.signal(order, lambda number, frame: asked.append(ORDERS[signal.Signals(number)]))
    try:
        place = task_environment(os.environ, available_cores())
        environment = {**os.environ, **place}
        if RENDEZVOUS_ADDRESS in environment and GLOO_INTERFACE not in environment:
            interface = interface_towards(environment[RENDEZVOUS_ADDRESS])
            environment |= {GLOO_INTERFACE: interface} if interface else {}
        code = run_marked(sys.argv[1:], environment, int(place["HOROVOD_RANK"]), asked)
        sys.exit(0 if asked else code)
    except HvdtrainError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def run_marked(
    argv: list[str], environment: dict[str, str], rank: int, asked: Sequence[int] = ()
) -> int:
    """Run the command, forward its output with marks, and return its exit code.

    Args:
        argv: The command.
        environment: Its environment.
        rank: Rank that it runs.
        asked: Signals to send to the rank; may grow meanwhile.
    """
    told = _RankNews(rank, environment)
    told.tick()
    # srun does not end processes that are orphaned below the task.
    process = start(argv, environment, stdin=None, session=False, dies_with_us=True)
    mark, pipes = mark_for(environment), Pipes()
    pipes.add_output(process, 1, 2)
    sent = 0
    while process.poll() is None:
        for number in asked[sent:]:
            sent += 1
            for pid in told.processes() or [process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        # A command usually ends right after its output.
        for descriptor, data in pipes.read(TICK_SECONDS if pipes.names else TICK_SECONDS / 10):
            write_all(descriptor, mark(data, rank, descriptor, LONGEST_PIECE))
        told.tick()
    # Processes that the rank left behind may hold the pipes open.
    for descriptor, data in pipes.rest(1, 2):
        write_all(descriptor, mark(data, rank, descriptor, LONGEST_PIECE))
    code = process.wait()
    told.tick(ended=True)
    return shell_code(code)


class _RankNews:
    """Reports to `hvdtrain run`, if that is the launcher, that the task is alive and the state of its rank: at once on
    changes, otherwise every few seconds."""

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self._rank = rank
        self._host = environment.get("SLURMD_NODENAME", "")
        wanted = TERMINAL in environment and LAUNCH_ID in environment
        self._monitor = RankMonitor(environment[LAUNCH_ID]) if wanted else None
        self._looked = self._told = float("-inf")
        self._before: Sequence[tuple[str, str]] = ()

    def processes(self) -> list[int]:
        """Return the process IDs of the rank, which the command may have started; [] if that is unknown."""
        if self._monitor is None:
            return []
        self._monitor.look(search=True)
        return [pid for rank, pid in self._monitor.processes() if rank == self._rank]

    def tick(self, *, ended: bool = False) -> None:
        now = time.monotonic()
        if self._monitor is None or (now - self._looked < LOOK_SECONDS and not ended):
            return
        self._looked = now
        ranks = [one for one in self._monitor.look() if one.rank == self._rank]
        found = [(one.state, one.phase) for one in ranks]
        if ended or found != self._before or now - self._told >= NEWS_SECONDS:
            self._told, self._before = now, found
            here = as_json(replace(one, host=self._host) for one in ranks)
            news = {"task": self._rank, "ended": ended, "ranks": here}
            write_all(1, marked_news(json.dumps(news), self._rank))


if __name__ == "__main__":
    main()
