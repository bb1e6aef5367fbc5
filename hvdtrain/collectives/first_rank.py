"""Rank 0 first: for what all ranks need and only one may make, such as a download into a shared folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import horovod.tensorflow as hvd

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.errors import EngineError, UsageError

NEWS_SECONDS = 5.0
"""Rank 0 says that it is still at work so often: Horovod's stall check sees no rank that waits for long."""

_NAME = "first_rank_first"
_BUSY, _DONE = "busy", "done"


@contextmanager
def first_rank_first() -> Iterator[None]:
    """Let rank 0 run the block of `with` first; the others wait until it is done, and run it then. A collective.

        with hvdtrain.first_rank_first():
            (x, y), _ = keras.datasets.mnist.load_data()  # rank 0 downloads, the others find the file

    The block may take as long as it needs, as long as rank 0 lives: no stall limit ends it. It must not contain
    collectives. Not for a folder that each host has on its own: there only rank 0's host has the file.

    Raises:
        EngineError: on the other ranks: rank 0 failed in the block, which they do not run then. Rank 0 goes on with
            its own error.
        UsageError: before hvdtrain.init.
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
    """On rank 0: report to the others that the block is running, and in the end how it ended."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(NEWS_SECONDS):
            ALL_RANKS.exchange(_BUSY, _NAME)

    # A daemon: what ends this process must not wait for ranks that are gone.
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
    """On the other ranks: until rank 0 says that it is done."""
    news = _BUSY
    while news == _BUSY:
        news = ALL_RANKS.exchange(None, _NAME)[0]
    if news != _DONE:
        raise EngineError(f"Rank 0 failed while the other ranks waited for it: {news}")
