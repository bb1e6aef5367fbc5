"""Data goes on at any step as it would have, in a process that has read nothing of what came before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data import KnownSource, Source, from_files, make_source, shard
from hvdtrain.data.user_sharded import ShardedSource

EXAMPLES, BATCH, RANKS = 22, 4, 2
X = np.arange(EXAMPLES, dtype=np.float32)[:, None]
Y = np.arange(EXAMPLES)


class Items(keras.utils.PyDataset):
    """Shuffles itself after each epoch, and remembers which items it made."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.ends = np.cumsum([0, *lengths])
        self.x, self.rng, self.made = X, np.random.default_rng(1), 0

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> Any:
        self.made += 1
        rows = self.x[self.ends[index] : self.ends[index + 1]]
        return rows, rows[:, 0].astype(int)

    def on_epoch_end(self) -> None:
        self.x = self.rng.permutation(self.x)


def slices() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def records(folder: Path) -> Any:
    for row in X:
        (folder / f"{int(row[0]):02}").write_bytes(row.tobytes())

    def read(name: Any) -> Any:
        row = tf.ensure_shape(tf.io.decode_raw(tf.io.read_file(name), tf.float32), [1])
        return row, tf.cast(row[0], tf.int64)

    return from_files(f"{folder}/*", read)


def reordered() -> Callable[[], Iterator[Any]]:
    rng = np.random.default_rng(4)

    def batches() -> Iterator[Any]:
        order = rng.permutation(EXAMPLES)
        for begin in range(0, EXAMPLES, 3):
            rows = order[begin : begin + 3]
            yield X[rows], Y[rows]

    return batches


KINDS: dict[str, Callable[[Path], Any]] = {
    "arrays": lambda folder: (X, Y),
    "files": records,
    "items": lambda folder: Items([2] * 11),
    "long items": lambda folder: Items([5] * 4 + [2]),
    "uneven items": lambda folder: Items([3, 1, 7, 6, 5]),
    "generators": lambda folder: reordered(),
    "shuffled once": lambda folder: slices().shuffle(9, 1, reshuffle_each_iteration=False).batch(4),
    "shuffled": lambda folder: slices().shuffle(9, seed=1).filter(lambda *_: True).batch(4),
    "cached": lambda folder: slices().shuffle(9, seed=1).cache().shuffle(9, seed=2).batch(4),
    "repeated": lambda folder: slices().shuffle(9, seed=1).repeat(2).batch(4),
    "taken": lambda folder: slices().shuffle(22, seed=1).take(9).batch(4),
    "sharded": lambda folder: slices().shuffle(9, seed=1).apply(shard).batch(2),
}


def made(kind: str, folder: Path, steps: int | None) -> Source:
    keras.utils.set_random_seed(1)
    return make_source(
        KINDS[kind](folder), global_batch_size=BATCH, shuffle=True, seed=1, steps_per_epoch=steps
    )


def labels(source: Source, epoch: int, begin: int = 0) -> list[Any]:
    if isinstance(source, KnownSource):
        shares = list(source.epoch(epoch, 1, RANKS, begin))
    else:
        shares = list(source.epoch(epoch, 1, RANKS))[begin:]
    return [[s.offset, s.global_examples, np.asarray(s.data[1]).tolist()] for s in shares]


@pytest.mark.filterwarnings("ignore:The first batch", "ignore:the data ran out")
@pytest.mark.parametrize("steps", [None, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_at_any_step(kind: str, steps: int | None, tmp_path: Path) -> None:
    undisturbed = made(kind, tmp_path, steps)
    assert not undisturbed.unrepeatable
    epochs = [labels(undisturbed, epoch) for epoch in range(4)]
    if kind not in ("shuffled once", "arrays", "files"):
        assert epochs[0] != epochs[1]  # Else a source that forgets where it was would pass.
    for epoch, step in ((0, 1), (2, 0), (2, 1), (3, len(epochs[3]) - 1)):
        resumed = made(kind, tmp_path, steps)
        resumed.skip(range(epoch), 1, RANKS)
        assert labels(resumed, epoch, step) == epochs[epoch][step:]
        assert [labels(resumed, later) for later in range(epoch + 1, 4)] == epochs[epoch + 1 :]


@pytest.mark.parametrize("kind", ["items", "shuffled", "cached", "taken"])
@pytest.mark.parametrize("steps", [None, 2])
def test_an_evaluation_begins_anew_each_time(kind: str, steps: int | None, tmp_path: Path) -> None:
    undisturbed, resumed = (made(kind, tmp_path, steps) for _ in range(2))
    found = [labels(undisturbed, 0) for _ in range(3)]
    assert found[0] != found[2]
    resumed.skip([0, 0], 1, RANKS)
    assert labels(resumed, 0) == found[2]


@pytest.mark.filterwarnings("ignore:The first batch")
def test_items_that_are_skipped_are_not_made() -> None:
    items = Items([2] * 11)
    source = make_source(items, global_batch_size=BATCH, shuffle=True, seed=1)
    items.made = 0
    source.skip(range(3), 0, 1)
    assert isinstance(source, KnownSource)
    assert len(list(source.epoch(3, 0, 1, 4))) == 2
    assert items.made == 3  # Of 2 examples each.


def counted(source: Any, read: list[int]) -> Any:
    def count(x: Any, y: Any) -> Any:
        read.append(1)
        return x, y

    return source.map(
        lambda x, y: tf.numpy_function(lambda a, b: count(a, b), [x, y], [x.dtype, y.dtype])
    ).map(lambda x, y: (tf.ensure_shape(x, [1]), tf.ensure_shape(y, [])))


def test_whole_passes_of_a_simple_pipeline_are_not_read() -> None:
    read: list[int] = []
    data = counted(slices().shuffle(9, seed=1), read).batch(4)
    source = make_source(data, global_batch_size=BATCH, shuffle=True, seed=1)
    source.skip(range(3), 0, 1)
    assert not read
    list(source.epoch(3, 0, 1))
    assert len(read) == EXAMPLES


def drawing(**options: Any) -> Any:
    return lambda x, y: (x + tf.random.uniform([1], **options), y)


def test_what_another_process_cannot_read_again_is_said() -> None:
    def reason(data: Any) -> str:
        return make_source(data, global_batch_size=BATCH, shuffle=True, seed=1).unrepeatable

    tf.random.set_seed(1)
    assert not reason(slices().shuffle(9).batch(4))
    assert not reason(slices().map(drawing()).batch(4))
    tf.compat.v1.set_random_seed(None)
    try:
        assert "Shuffle has no seed: set one (seed=1)" in reason(slices().shuffle(9).batch(4))
        assert "RandomUniform" in reason(slices().map(drawing()).batch(4))
        assert not reason(slices().shuffle(9, seed=1).map(drawing(seed=1)).batch(4))
    finally:
        tf.random.set_seed(1)
    at_once = {"num_parallel_calls": 2}
    assert "several threads" in reason(slices().map(drawing(seed=1), **at_once).batch(4))
    layer = keras.layers.RandomRotation(0.1, seed=1)

    def rotated(x, y):  # type: ignore[no-untyped-def]
        return layer(tf.reshape(x, [1, 1, 1]), training=True)[0, 0], y

    assert not reason(slices().map(rotated).batch(4))
    assert "several threads" in reason(slices().map(rotated, **at_once).batch(4))
    unordered = slices().map(lambda x, y: (x, y), deterministic=False, **at_once)
    assert "deterministic=False" in reason(unordered.batch(4))
    assert "cannot be read a second time: pass the function" in reason(reordered()())
    own = make_source(reordered()(), global_batch_size=BATCH, shuffle=True, seed=1)
    assert ShardedSource(own, None).unrepeatable == own.unrepeatable
