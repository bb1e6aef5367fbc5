"""Read ahead in a thread, so that the next batch is made while the current one trains."""

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

JOIN_SECONDS = 10.0
"""How long an early end waits for an item that is being made; the thread is a daemon after that."""


@dataclass(frozen=True)
class _End:
    error: BaseException | None


def prefetch(iterator: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
    """The items of `iterator`, made in another thread, at most `depth` of them waiting.

    An exception of the iterator is raised here, where its item would have come. When the consumer
    stops early (closes or drops this generator), the thread ends and closes the iterator.
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
        # The producer checks `stopped` before each put, so after this at most one more item
        # comes, and there is room for it: the producer cannot be left waiting.
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
