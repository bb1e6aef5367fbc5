"""End a stuck rank that no `hvdtrain run` watches, from a thread of the rank itself, under another launcher.

It sees only that this rank has waited too long, not which other rank is the cause. Over MPI, Horovod's own stall check
is stuck as well. A thread cannot notice that its own process is frozen, or that its interpreter hangs in a function
which holds the interpreter's lock; then the ranks that wait for such a rank end, and their launcher ends it.
"""

from __future__ import annotations

import faulthandler
import math
import os
import socket
import threading
import time
from collections.abc import Mapping

from hvdtrain.environment import EXIT_HANG, HANG_SECONDS, HANG_TIMEOUT, LAUNCH_ID
from hvdtrain.errors import UsageError
from hvdtrain.rank_variables import rank_of, size_of
from hvdtrain.standard_streams import write_all
from hvdtrain.worker.heartbeat import WITH_BEATS, Heartbeat, current

POLL_SECONDS = 5.0


def end_when_stuck(environ: Mapping[str, str]) -> None:
    """From now on, end this rank with exit code 124 when it makes no progress, unless hvdtrain's launcher watches it.

    Args:
        environ: Environment of this process. HVDTRAIN_HANG_TIMEOUT is the limit in seconds; 1800 if not set, 0: none.

    Raises:
        UsageError: The variable is not a number of seconds.
    """
    limit = hang_limit(environ)
    name = "hvdtrain-stuck-rank"
    watched = LAUNCH_ID in environ or any(one.name == name for one in threading.enumerate())
    if not watched and size_of(environ) > 1 and limit > 0:
        arguments = (limit, rank_of(environ))
        threading.Thread(target=_watch, args=arguments, daemon=True, name=name).start()


def hang_limit(environ: Mapping[str, str]) -> float:
    """Return the seconds in HVDTRAIN_HANG_TIMEOUT; 1800 if it is not set. Raises as `end_when_stuck`."""
    text = environ.get(HANG_TIMEOUT) or str(HANG_SECONDS)
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < math.inf:
        raise UsageError(f"{HANG_TIMEOUT} must be seconds, 0 or more, not {text!r}")
    return limit


def _watch(limit: float, rank: int) -> None:
    interval = min(POLL_SECONDS, limit / 4)
    looked = resumed = time.monotonic()
    while True:
        time.sleep(interval)
        now = time.monotonic()
        if now - looked > interval + POLL_SECONDS:
            resumed = now  # This process, or its machine, was halted; that time does not count.
        looked = now
        if reason := reason_to_end(current(), now, resumed, limit):
            _end(f"rank {rank} on host {socket.gethostname()} {reason}")


def reason_to_end(beat: Heartbeat, now: float, resumed: float, limit: float) -> str:
    """Return why a rank must be ended; empty if there is no reason.

    Args:
        beat: Last heartbeat of the rank.
        now: Current time, in seconds of CLOCK_MONOTONIC.
        resumed: Time since when the rank has run without a halt, on the same clock.
        limit: Longest time without progress, in seconds.
    """
    limit += beat.allowed
    # In join, a rank waits for those that have more data.
    expected = beat.phase in WITH_BEATS or (beat.waiting and beat.detail != "join")
    if not expected or now - max(beat.since, resumed) < limit:
        return ""
    return (
        f"has made no progress for {limit:g} s, in {beat.place}: a rank that it waits for may be frozen or "
        f"gone. The job is ended; {HANG_TIMEOUT} changes the limit (0: none). Stack of this rank:"
    )


def _end(text: str) -> None:
    try:
        write_all(2, f"\n{text}\n".encode())
        faulthandler.dump_traceback(2, all_threads=True)
    finally:
        os._exit(EXIT_HANG)
