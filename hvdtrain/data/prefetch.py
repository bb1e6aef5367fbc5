"""Prefetches items in a thread, so that the next batch is prepared while the current one trains."""

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

JOIN_SECONDS = 10.0
"""Maximum wait for an item in progress when the consumer stops early; the thread is a daemon."""


@dataclass(frozen=True)
class _End:
    error: BaseException | None


def prefetch(iterator: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
    """Yield the items of `iterator`, made in another thread, with at most `depth` of them waiting.

    An exception of the iterator is raised here in place of its item. When the consumer stops early (closes or drops
    this generator), the thread ends and closes the iterator.
    """
    assert depth >= 1, depth
    items: queue.Queue[T | _End] = queue.Queue(depth)
    stopped = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(iterator, items, stopped), name="hvdtrain-prefetch", daemon=True
    )
    thread.start()
    try:
        while not isinstance(item := items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        # The producer checks `stopped` before each put, so at most one more item comes, and there is room for it:
        # the producer cannot block.
        while not items.empty():
            items.get_nowait()
        thread.join(JOIN_SECONDS)


def _produce(
    iterator: Iterator[T], items: "queue.Queue[T | _End]", stopped: threading.Event
) -> None:
    error = None
    try:
        for item in iterator:
            if stopped.is_set():
                break
            items.put(item)
        if isinstance(iterator, Generator):
            iterator.close()
    except BaseException as raised:
        error = raised
    if not stopped.is_set():
        items.put(_End(error))
