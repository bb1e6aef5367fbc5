"""Reading ahead in a thread: nothing lost, nothing hidden, nothing left behind."""

import itertools
import threading

import pytest

from hvdtrain.data import prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "hvdtrain-prefetch"]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_gives_all_items_in_order(depth):
    assert list(prefetch(iter(range(100)), depth)) == list(range(100))
    assert list(prefetch(iter([]), depth)) == []
    assert not threads()


def test_raises_where_the_item_would_have_come():
    def broken():
        yield 1
        raise KeyError("the cause")

    seen = []
    with pytest.raises(KeyError, match="the cause") as caught:
        for item in prefetch(broken()):
            seen.append(item)
    assert seen == [1]
    assert any(entry.name == "broken" for entry in caught.traceback)
    assert not threads()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("read", [1, 2, 50])
def test_an_early_end_closes_the_iterator_and_ends_the_thread(depth, read):
    closed = threading.Event()

    def endless():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    source = endless()  # held, so that it isn't closed by being dropped
    items = prefetch(source, depth)
    assert list(itertools.islice(items, read)) == list(range(read))
    items.close()
    assert closed.is_set()
    assert not threads()


def test_stays_at_most_depth_ahead():
    made = []

    def counting():
        for index in itertools.count():
            made.append(index)
            yield index

    items = prefetch(counting(), 2)
    next(items)
    threading.Event().wait(0.2)
    # One was taken, two wait, one is in the thread's hand.
    assert len(made) <= 4
    items.close()


def test_ends_while_an_item_is_being_made():
    entered, release = threading.Event(), threading.Event()

    def slow():
        yield 0
        entered.set()
        release.wait(20)
        yield 1

    items = prefetch(slow())
    next(items)
    assert entered.wait(20)
    threading.Timer(0.1, release.set).start()
    items.close()
    assert not threads()
