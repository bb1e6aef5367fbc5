"""Rank 0 first: for work whose result all ranks need, such as a download into a shared folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import horovod.tensorflow as hvd

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.errors import EngineError, UsageError

NEWS_SECONDS = 5.0
"""Interval at which rank 0 reports that it is still busy, so that Horovod's stall check sees no long wait."""

_NAME = "first_rank_first"
_BUSY, _DONE = "busy", "done"


@contextmanager
def first_rank_first() -> Iterator[None]:
    """Run the `with` block on rank 0 first, then on all other ranks. A collective.

        with hvdtrain.first_rank_first():
            (x, y), _ = keras.datasets.mnist.load_data()  # rank 0 downloads, the others find the file

    The block may take any time while rank 0 is alive: the stall check does not apply. It must not contain
    collectives. It does not help with a folder that is local to each host: only rank 0's host has the file then.

    Raises:
        EngineError: On the other ranks, which then skip the block: rank 0 failed in it. Rank 0 raises its own error.
        UsageError: hvdtrain.init has not been called.
    """
    if not hvd.is_initialized():
        raise UsageError("first_rank_first: call hvdtrain.init() first")
    if hvd.size() == 1:
        yield
    elif hvd.rank() == 0:
        with _news():
            yield
    else:
        _wait()
        yield


@contextmanager
def _news() -> Iterator[None]:
    """On rank 0: report to the other ranks that the block is running, and finally how it ended."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(NEWS_SECONDS):
            ALL_RANKS.exchange(_BUSY, _NAME)

    # A daemon, so that the end of this process does not wait for ranks that are gone.
    teller = threading.Thread(target=tell, daemon=True, name="hvdtrain-first-rank")
    teller.start()
    outcome = _DONE
    try:
        yield
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
        raise
    finally:
        ended.set()
        teller.join()
        ALL_RANKS.exchange(outcome, _NAME)


def _wait() -> None:
    """On the other ranks: wait until rank 0 reports the end of its block."""
    news = _BUSY
    while news == _BUSY:
        news = ALL_RANKS.exchange(None, _NAME)[0]
    if news != _DONE:
        raise EngineError(f"Rank 0 failed while the other ranks waited for it: {news}")
