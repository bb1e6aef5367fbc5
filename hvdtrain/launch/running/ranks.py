"""The ranks of a launch on this host, and how they are warned.

Every process of a launch carries the launch's id in its environment; a rank also carries its
number, and so do the processes that it has started. The ranks are the topmost of these.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.launch.running.process import ProcessState, processes_of, state_of
from hvdtrain.rank_variables import is_rank
from hvdtrain.worker.frames import HELPER

_MPI_DAEMONS = {"orted", "prted"}


def topmost(parents: Mapping[int, int]) -> set[int]:
    """Of process id -> parent's id: those whose parent is none of them."""
    return {pid for pid, parent in parents.items() if parent not in parents}


@dataclass(frozen=True)
class RankProcess:
    """A rank, or a process that a rank has started.

    Attributes:
        environ: what it was started with.
        state: what /proc tells of it.
    """

    environ: Mapping[str, str]
    state: ProcessState


def rank_processes(launch_id: str) -> dict[int, RankProcess]:
    """The ranks of the launch on this host and what they have started, by process id."""
    found = {}
    for pid in processes_of(launch_id):
        with contextlib.suppress(OSError, ValueError):
            environ = environment_of(pid)
            if (
                is_rank(environ)
                and (Path("/proc") / str(pid) / "comm").read_text() != f"{HELPER}\n"
            ):
                found[pid] = RankProcess(environ, state_of(pid))
    return found


def environment_of(pid: int) -> dict[str, str]:
    """What a process of this user was started with. Raises OSError for one that has ended."""
    entries = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def ranks_of(launch_id: str) -> dict[int, ProcessState]:
    """The ranks of the launch that run on this host, by process id."""
    found = rank_processes(launch_id)
    return {pid: found[pid].state for pid in topmost({p: r.state.parent for p, r in found.items()})}


def mpi_daemons_of(launch_id: str) -> set[int]:
    """The processes of Open MPI that run the launch's ranks on this host; they carry no id."""
    daemons = set()
    for state in ranks_of(launch_id).values():
        with contextlib.suppress(OSError):
            if (Path("/proc") / str(state.parent) / "comm").read_text().strip() in _MPI_DAEMONS:
                daemons.add(state.parent)
    return daemons


class Warner:
    """Passes a warning on to the ranks of this host, each once and none before it is prepared.

    Before a rank has its handler the signal would end it. So a warning stands: call `tick` again
    and again, also for ranks that start later.
    """

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        self._standing = False
        self._told: set[int] = set()

    def warn(self) -> None:
        """A (new) warning came."""
        self._standing = True
        self._told.clear()

    def tick(self) -> None:
        """Tell the ranks that have not been told yet."""
        if not self._standing:
            return
        for pid, state in ranks_of(self._launch_id).items():
            if pid not in self._told and signal.SIGUSR1 in state.caught:
                self._told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
