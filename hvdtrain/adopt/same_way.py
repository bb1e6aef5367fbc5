"""Finds out whether all ranks still make the same calls of a script.

They do, unless the script asks for the time, or for random numbers of the system: a loop that trains for ten minutes
may call `fit` once more on one rank. Where ranks part, rank 0 goes on alone, as one process would, and the others end.
"""

from __future__ import annotations

import contextlib
import os
import zlib

import numpy as np

from hvdtrain.adopt.notes import Notes
from hvdtrain.collectives.communicator import ALL_RANKS, Max
from hvdtrain.errors import UsageError

END = "the end of the script"


class SameWay:
    """The calls so far.

    Args:
        notes: Messages to the user.

    Attributes:
        parted: Whether this rank goes on alone, or this is a process that the script has forked, of which no other rank
            knows.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._process = os.getpid()
        self.parted = False
        os.register_at_fork(after_in_child=self._part)

    def _part(self) -> None:
        self.parted = True

    def require_ranks_process(self, what: str) -> None:
        """Raise UsageError in a process that the script has forked, in which TensorFlow would wait forever."""
        if os.getpid() != self._process:
            raise UsageError(
                f"{self._notes.place(what)}: a process that is forked cannot train or predict under --adopt, as "
                'TensorFlow starts before the script. Start it with multiprocessing.get_context("spawn")'
            )

    def joins(self, what: str) -> bool:
        """Return whether all ranks make this call from the same line of the script. A collective.

        Raises:
            SystemExit: They do not, and this rank is not the first.
        """
        if self.parted or self._notes.rank.size == 1:
            return not self.parted
        call = what if what == END else self._notes.place(what)
        code = zlib.crc32(call.encode())
        most, least = ALL_RANKS.allreduce(np.array([code, -code]), "adopted_call", Max).numpy()
        if most == -least:
            return True
        self.parted = True
        calls = ALL_RANKS.exchange(call, "adopted_calls")
        if not self._notes.rank.is_first:
            raise SystemExit(0)
        if what != END:
            rank = next(number for number, other in enumerate(calls) if other != call)
            self._notes.tell(
                what,
                "rank 0 goes on alone, with the result of one process, as not all workers come here: rank "
                f"{rank} is at {calls[rank]}. Does the script ask for the time, or for numbers without a seed?",
            )
        return False

    def end(self) -> None:
        """Let ranks that go on know that this one has reached the end of the script. A collective."""
        with contextlib.suppress(SystemExit):
            self.joins(END)
