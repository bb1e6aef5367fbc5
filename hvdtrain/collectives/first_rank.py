"""Rank 0 first, or alone: for work whose result all ranks need, such as a download into a shared folder."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.collectives.consistency import raise_alike
from hvdtrain.collectives.step_context import without_others
from hvdtrain.errors import EngineError, UsageError
from hvdtrain.worker.stuck_rank import hang_limit

NEWS_SECONDS = 5.0
"""Interval at which rank 0 reports that it is still busy, so that Horovod's stall check sees no long wait."""

_BUSY, _DONE = "busy", "done"


@contextmanager
def first_rank_first() -> Iterator[None]:
    """Run the `with` block on rank 0 first, then on all other ranks. A collective.

        with hvdtrain.first_rank_first():
            (x, y), _ = keras.datasets.mnist.load_data()  # rank 0 downloads, the others find the file

    The block may take any time while rank 0 is alive: the stall check does not apply. It must not contain collectives,
    which raise an error there. It does not help with a folder that is local to each host: only rank 0's host has the
    file then.

    Raises:
        EngineError: On the other ranks, which then skip the block: rank 0 failed in it. Rank 0 raises its own error.
        UsageError: hvdtrain.init has not been called.
    """
    if not hvd.is_initialized():
        raise UsageError("first_rank_first: call hvdtrain.init() first")
    with first_rank_alone(ALL_RANKS, "first_rank_first", math.inf) as is_first:
        if is_first:
            yield
    if not is_first:
        yield


def on_first(work: Callable[[], Any], name: str, ranks: Communicator = ALL_RANKS) -> Any:
    """Call `work` on the first rank only, and return its result on all ranks. A collective.

    As in `first_rank_first`, `work` must not contain collectives, and the stall check does not apply for the first
    HVDTRAIN_HANG_TIMEOUT seconds: a file system that never answers ends the job after that.

    Args:
        work: Function that returns an object that `Communicator.exchange` accepts.
        name: Name of the collective, and of the work in messages.
        ranks: Ranks that take part.

    Raises:
        UsageError: On all ranks: the result cannot be sent, or `work` failed as a user's mistake; see raise_alike.
        EngineError: On all ranks but the first: `work` failed otherwise. The first rank raises the error itself.
    """
    result, failed = None, None
    with first_rank_alone(ranks, name) as is_first:
        if is_first:
            try:
                result = work()
            except Exception as error:
                failed = error
    raise_alike(failed, name, ranks)
    return ranks.exchange(result, name)[0]


@contextmanager
def first_rank_alone(ranks: Communicator, name: str, limit: float | None = None) -> Iterator[bool]:
    """Yield whether this is the first rank; the block ends on the others when it has ended there. A collective.

    The block must not contain collectives.

    Args:
        ranks: Ranks that take part.
        name: Name of the collective.
        limit: Seconds after which the stall check applies to the block. None: those of HVDTRAIN_HANG_TIMEOUT.

    Raises:
        EngineError: On the other ranks: the first one failed in the block.
    """
    if limit is None:
        limit = hang_limit(os.environ) or math.inf
    if ranks.size() == 1:
        yield True
    elif ranks.rank() == 0:
        with _news(ranks, name, limit):
            yield True
    else:
        yield False
        _wait(ranks, name)


@contextmanager
def _news(ranks: Communicator, name: str, limit: float) -> Iterator[None]:
    """On the first rank: report to the others that the block is running, and finally how it ended."""
    ended = threading.Event()
    until = time.monotonic() + limit

    def tell() -> None:
        while not ended.wait(NEWS_SECONDS) and time.monotonic() < until:
            try:
                ranks.exchange(_BUSY, name)
            except Exception:  # The last exchange raises it in the thread that can handle it.
                return

    # A daemon, so that the end of this process does not wait for ranks that are gone.
    teller = threading.Thread(target=tell, daemon=True, name="hvdtrain-first-rank")
    teller.start()
    outcome = _DONE
    try:
        with without_others(ranks.ranks[:1]):
            yield
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
        raise
    finally:
        ended.set()
        teller.join()
        ranks.exchange(outcome, name)


def _wait(ranks: Communicator, name: str) -> None:
    """On the other ranks: wait until the first one reports the end of its block."""
    news = _BUSY
    while news == _BUSY:
        news = ranks.exchange(None, name)[0]
    if news != _DONE:
        raise EngineError(
            f"Rank {ranks.ranks[0]} failed while the other ranks waited for it: {news}"
        )
