"""A PyDataset by item: the global batches of arrays, from few calls of __getitem__ on each rank."""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_arrays import numbers, order, read, source
from test_data_streams import Batches, OnRanks, assert_same, stream

from hvdtrain.checkpoint.random_states import random_states
from hvdtrain.data import KnownSource
from hvdtrain.data.random_generators import drawing_from, generators_in
from hvdtrain.errors import UsageError


class Asked(Batches):
    """Counts its calls."""

    def __init__(self, n, batch, **options):
        super().__init__(n, batch, **options)
        self.asked = Counter()

    def __getitem__(self, index):
        self.asked[index] += 1
        return super().__getitem__(index)


@settings(max_examples=80)
@given(
    n=st.integers(1, 60),
    item=st.integers(1, 20),
    batch=st.integers(1, 20),
    shuffle=st.booleans(),
    steps=st.one_of(st.none(), st.integers(1, 5)),
    workers=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_the_same_global_batches_for_any_number_of_ranks(
    n, item, batch, shuffle, steps, workers, data
):
    size = data.draw(st.integers(1, batch))

    def sources(count):
        options = {"shuffle": shuffle, "steps_per_epoch": steps}
        return OnRanks(
            [stream(Batches(n, item, workers=workers), batch, **options) for _ in range(count)]
        )

    alone, ranks = sources(1), sources(size)
    for epoch in range(3):
        assert_same(read(ranks, epoch, size), read(alone, epoch))
    if not shuffle:
        expected = source(n, batch, shuffle=False, steps_per_epoch=steps)
        assert_same(read(alone, 1), read(expected, 1))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("item", "calls"), [(8, 32), (4, 64), (32, 16), (1, 256)])
def test_a_rank_asks_for_its_own_items(item, calls, shuffle):
    """512 examples, 16 batches of 32 over 2 ranks of 16 rows: half of the items where they fit in."""
    datasets = [Asked(512, item) for _ in range(2)]
    sources = [stream(dataset, 32, shuffle=shuffle) for dataset in datasets]
    for rank, (data, dataset) in enumerate(zip(sources, datasets, strict=True)):
        dataset.asked.clear()
        list(data.epoch(0, rank, 2))
        # One more on rank 1: the item that the ranks compare.
        assert sum(dataset.asked.values()) == calls + (rank if item < 32 else 0)
    if item < 32:
        both = datasets[0].asked + datasets[1].asked
        assert len(both) == 512 // item and sum(both.values()) == len(both) + 1


def test_hooks_stand_around_each_epoch():
    dataset = Asked(20, 5)
    data = stream(dataset, 8, steps_per_epoch=2)
    for epoch in range(4):
        dataset.calls.clear()
        read(data, epoch)
        assert dataset.calls == ["begin", "end"]


class Reshuffled(Batches):
    """Shuffles itself, each rank in its own way."""

    def on_epoch_end(self):
        rng = np.random.default_rng(id(self))
        self.data = tuple(rng.permutation(part) for part in self.data)


def test_the_ranks_can_see_that_they_have_other_items():
    sources = [stream(Reshuffled(64, 4)) for _ in range(2)]

    def checksums(epoch):
        ranks = [list(one.epoch(epoch, rank, 2)) for rank, one in enumerate(sources)]
        return [[share.checksum for share in shares] for shares in ranks]

    one, other = checksums(0)
    assert one == other and one[0] is not None and set(one[1:]) == {None}
    one, other = checksums(1)
    assert one[0] != other[0]


class Augmented(Batches):
    """Draws from the global generators in each item, and shuffles itself with them, as most scripts do."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + np.random.normal(size=x.shape) + random.random(), y

    def on_epoch_end(self):
        order = np.random.permutation(len(self.data[0]))
        self.data = tuple(part[order] for part in self.data)


def test_random_numbers_do_not_depend_on_the_number_of_ranks():
    """The items of all ranks, in the same order, and what is drawn after them."""

    def trained(size):
        batches, checksums, after = [], [], []
        for rank in range(size):
            # As hvdtrain.init(seed=1) does, in a process for each rank.
            random.seed(1)
            np.random.seed(1)
            data = stream(Augmented(64, 4), 8, seed=3)
            shares = [share for epoch in range(3) for share in data.epoch(epoch, rank, size)]
            batches.append([share.data[0] for share in shares])
            checksums.append([share.checksum for share in shares])
            after.append((random.random(), np.random.random()))
        assert all(one == checksums[0] for one in checksums)
        assert all(one == after[0] for one in after)
        return [np.concatenate(parts) for parts in zip(*batches, strict=True)], after[0]

    (alone, left), (together, left_of_two) = trained(1), trained(2)
    assert len(alone) == 24
    for one, same in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, same)
    assert left == left_of_two


def test_a_checkpoint_holds_no_state_of_an_item():
    """It is made by another thread than the items."""
    before = random_states()
    with ThreadPoolExecutor(1) as other:
        with drawing_from(1, 2) as draws:
            found = other.submit(random_states)
            assert not draws()
            random.random()
            assert draws()
            time.sleep(0.05)
        for name in ("random", "numpy"):
            for one, same in zip(found.result()[name], before[name], strict=True):
                np.testing.assert_array_equal(one, same)


class Uneven(keras.utils.PyDataset):
    def __init__(self, lengths):
        super().__init__()
        x, y = numbers(sum(lengths))
        cuts = np.cumsum(lengths)[:-1]
        self.items = list(zip(np.split(x, cuts), np.split(y, cuts), strict=True))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_items_of_other_lengths():
    """Known to differ: every rank reads them all. Found to differ: an error that says which."""
    for lengths in ([2, 3, 4], [3, 3, 5]):
        sources = [stream(Uneven(lengths), 4) for _ in range(2)]
        assert not isinstance(sources[0], KnownSource)
        assert order(read(OnRanks(sources), 0, 2)) == list(range(sum(lengths)))
    late = stream(Uneven([3, 3, 3, 2, 3]), 4)
    with pytest.raises(UsageError, match=r"item 3 of the PyDataset Uneven has 2 examples, not 3"):
        list(late.epoch(0, 0, 1))


class Augmenter:
    """Draws from generators of its own, of all kinds, in each item, and shuffles with the first."""

    def __init__(self):
        self.rng = np.random.default_rng(1)
        self.older = {"legacy": [np.random.RandomState(2)]}
        self.python = random.Random(3)
        self.keras = keras.random.SeedGenerator(4)
        self.tensorflow = tf.random.Generator.from_seed(5)
        self.layers = keras.Sequential([keras.layers.RandomBrightness(0.5, seed=6)])

    def noise(self, shape):
        image = self.layers(np.full((1, 2, 2, 3), 100.0, np.float32), training=True)
        parts = [
            self.rng.normal(size=shape),
            self.older["legacy"][0].normal(size=shape),
            self.python.random(),
            keras.random.normal(shape, seed=self.keras),
            self.tensorflow.normal(shape),
            np.asarray(image)[0, 0, 0, 0],
        ]
        return sum(np.asarray(one, np.float64) * 10.0**k for k, one in enumerate(parts))


class HoldsGenerators(Batches):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.augmenter = Augmenter()

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.augmenter.noise(x.shape), y

    def on_epoch_end(self):
        order = self.augmenter.rng.permutation(len(self.data[0]))
        self.data = tuple(part[order] for part in self.data)


@pytest.mark.filterwarnings("ignore:the PyDataset HoldsGenerators draws", "ignore:The first batch")
@pytest.mark.parametrize("workers", [1, 3])
def test_generators_of_the_datasets_own_draw_the_same_for_any_number_of_ranks(workers):
    """On two ranks, and in a process that goes on in the last epoch."""

    def data():
        return stream(HoldsGenerators(32, 4, workers=workers), 8, seed=3)

    def xs(source, rank, size, epochs):
        shares = [share for epoch in epochs for share in source.epoch(epoch, rank, size)]
        return [share.data[0] for share in shares]

    alone, halves = data(), [data() for _ in range(2)]
    expected = xs(alone, 0, 1, range(3))
    found = [
        np.concatenate(x)
        for x in zip(*(xs(one, r, 2, range(3)) for r, one in enumerate(halves)), strict=True)
    ]
    assert len({x.tobytes() for x in expected}) == len(expected) == 12
    np.testing.assert_array_equal(found, expected)
    resumed = data()
    resumed.skip([0, 1], 0, 1)
    np.testing.assert_array_equal(xs(resumed, 0, 1, [2]), expected[8:])


def test_the_seeds_of_a_model_that_is_trained_are_not_the_datas() -> None:
    """The reading thread must not set them while the model trains."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dropout(0.5)])
    held = SimpleNamespace(model=model, rng=np.random.default_rng(1))
    assert len(generators_in(held)) == 2
    model.compile()
    assert len(generators_in(held)) == 1


def test_threads_that_would_share_a_generator_are_told():
    source = stream(HoldsGenerators(8, 4, workers=2), 4)
    with pytest.warns(
        UserWarning, match="its workers=2 share, so its items are made one at a time"
    ):
        list(source.epoch(0, 0, 1))


def test_random_items_of_other_lengths_go_on_as_they_would_have():
    class Random(Uneven):
        rng = None

        def __getitem__(self, index):
            self.rng = self.rng or np.random.default_rng(1)
            x, y = super().__getitem__(index)
            return x + self.rng.normal(size=x.shape), y

    undisturbed, resumed = (stream(Random([2, 3, 4]), 4) for _ in range(2))
    expected = [share.data[0] for epoch in (0, 1) for share in undisturbed.epoch(epoch, 0, 1)][3:]
    resumed.skip([0], 0, 1)
    for one, same in zip(resumed.epoch(1, 0, 1), expected, strict=True):
        np.testing.assert_array_equal(one.data[0], same)


def test_weights_and_x_alone():
    weighted = [stream(Batches(20, 3), class_weight={3: 5.0}) for _ in range(2)]
    seen = np.concatenate([batch[2] for batch in read(OnRanks(weighted), 0, 2)])
    np.testing.assert_array_equal(seen, [1, 1, 1, 5] + [1] * 16)
    assert weighted[0].element[2] == ((), "float32")
    with pytest.raises(UsageError, match="y was passed together with a PyDataset Batches"):
        stream(Batches(20, 3), y=np.zeros(20))
