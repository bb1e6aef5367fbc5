"""Streams as a source: the same global batches as from arrays, whatever the batches come in."""

import itertools
import warnings
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_data_arrays import numbers, order, read, source

from hvdtrain.data import Spec, is_batched, make_source
from hvdtrain.errors import UsageError


def cuts(n, lengths):
    """Numbers in batches of the given lengths, over and over."""
    x, y = numbers(n)
    begin = 0
    while begin < n:
        for length in lengths:
            if begin < n:
                yield x[begin : begin + length], y[begin : begin + length]
            begin += length


class Batches(keras.utils.PyDataset):
    def __init__(self, n, batch, length="known", **options):
        super().__init__(**options)
        self.data = numbers(n)
        self.batch = batch
        self.length = length
        self.calls = []

    @property
    def num_batches(self):
        return None if self.length is None else -(-len(self.data[0]) // self.batch)

    def __getitem__(self, index):
        begin = index * self.batch % len(self.data[0])
        return tuple(part[begin : begin + self.batch] for part in self.data)

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


def slices(n):
    return tf.data.Dataset.from_tensor_slices(numbers(n))


def stream(data, batch=8, **options):
    return make_source(data, **{"global_batch_size": batch, "shuffle": False, "seed": 1, **options})


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype


class Again:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return cuts(self.n, [4])


KINDS = {
    "generator": lambda n: cuts(n, [3]),
    "generator function": lambda n: partial(cuts, n, [5, 1]),
    "iterable": Again,
    "PyDataset": lambda n: Batches(n, 6),
    "PyDataset with workers": lambda n: Batches(n, 2, workers=3),
    "examples": slices,
    "batches": lambda n: slices(n).batch(5),
    "right batches": lambda n: slices(n).batch(8),
    "padded batches": lambda n: slices(n).padded_batch(7),
    "prefetched": lambda n: (
        slices(n).map(lambda x, y: (x, y), tf.data.AUTOTUNE).batch(30).prefetch(2)
    ),
}


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_batches_of_arrays(kind, size):
    expected = read(source(35, 8, shuffle=False), size=size)
    # A rank has a stream of its own.
    sources = [stream(KINDS[kind](35)) for _ in range(size)]
    assert sources[0].agreed == kind.startswith("PyDataset")
    assert sources[0].element == (Spec((1,), "float32"), Spec((), "int64"))
    assert_same(read(OnRanks(sources), size=size), expected)
    if kind != "generator":
        assert_same(read(OnRanks(sources), 1, size), expected)


def test_a_cache_file_that_another_process_writes(tmp_path):
    """The second rank finds the first one's lockfile, and removes its files as it ends."""
    name = f"{tmp_path}/cache"
    first, other = (slices(20).cache(name).batch(4) for _ in range(2))
    shares = stream(first, 8).epoch(0, 0, 2)
    next(shares)
    for one in (stream(other, 8).epoch(0, 1, 2), shares):
        with pytest.raises(UsageError, match=f"caches in the file {name}, which .* put the rank"):
            list(one)
    (tmp_path / "cache_0.lockfile").touch()
    with pytest.raises(UsageError, match=rf"was killed\..*remove {name}\*"):
        read(stream(other, 8))


class OnRanks:
    """Sources of several ranks, as one."""

    def __init__(self, sources):
        self.sources = sources

    def epoch(self, epoch, rank, size):
        return self.sources[rank].epoch(epoch, rank, size)


@settings(max_examples=60)
@given(
    n=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    batch=st.integers(1, 15),
    data=st.data(),
)
@pytest.mark.filterwarnings("ignore:The first batch of")
def test_batches_of_another_size_are_rebatched(n, lengths, batch, data):
    size = data.draw(st.integers(1, batch))
    assume(lengths[0] != batch)
    sources = [stream(partial(cuts, n, lengths), batch) for _ in range(size)]
    assert_same(read(OnRanks(sources), 0, size), read(source(n, batch, shuffle=False)))


@settings(max_examples=30)
@given(
    batch=st.integers(2, 12),
    lengths=st.lists(st.integers(1, 12), max_size=5),
    size=st.integers(1, 3),
)
def test_batches_of_the_right_size_are_used_as_they_come(batch, lengths, size):
    size = min(size, batch)
    lengths = [batch, *(min(length, batch) for length in lengths)]
    make = partial(cuts, sum(lengths), lengths)
    sources = [stream(make, batch) for _ in range(size)]
    assert_same(read(OnRanks(sources), 0, size), list(make()))


def test_only_batches_of_another_size_are_warned_of():
    def warned(lengths, workers=1, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = stream(partial(cuts, 20, lengths), **options)
            for epoch in range(2):
                list(data.epoch(epoch, 0, workers))
        assert {warning.filename for warning in caught} <= {__file__}, "a line of the user's"
        return [str(warning.message) for warning in caught]

    (message,) = warned([4])
    assert "has 4 examples, so its batches are joined and cut to global_batch_size 8" in message
    assert len(warned([5, 8])) == len(warned([4], workers=4)) == 1
    assert not warned([4], training=False)
    assert not warned([8, 3]) and not warned([4], workers=2) and not warned([20])[1:]
    with pytest.raises(UsageError, match=r"9 examples, more than global_batch_size 8.*rebatch"):
        warned([8, 9])


STEPS = [None, 1, 2, 3, 5]


def seen_by_keras(data, epochs, **options):
    """The batches that plain Keras trains on."""
    seen = []

    class Seeing(keras.Model):
        def train_step(self, data):
            seen.append(data[1].numpy().tolist())
            return {"loss": 0.0}

    model = Seeing()
    model.compile(run_eagerly=True)
    model.fit(*data, epochs=epochs, shuffle=False, verbose=0, **options)
    return seen


@pytest.mark.filterwarnings("ignore:(the data|Your input) ran out")
@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        *itertools.product(["arrays", "Dataset", "shuffled", "repeated", "PyDataset"], STEPS),
        # Where a pass of unknown length ends with an epoch, Keras has one without a step before it begins anew.
        *(("unknown length", steps) for steps in STEPS if steps not in (1, 3)),
    ],
)
def test_the_epochs_of_keras(kind, steps):
    """Passes of three batches, of which the last is short."""

    def make():
        keras.utils.set_random_seed(1)
        if kind == "arrays":
            return numbers(18)
        if kind == "PyDataset":
            return (Batches(18, 8),)
        data = slices(18).shuffle(9, seed=1) if kind == "shuffled" else slices(18)
        if kind == "unknown length":
            data = data.filter(lambda *_: True)
        data = data.batch(8)
        return (data.repeat(2),) if kind == "repeated" else (data,)

    batch = {"batch_size": 8} if kind == "arrays" else {}
    data = stream(make() if kind == "arrays" else make()[0], steps_per_epoch=steps)
    ours = [share.data[1].tolist() for epoch in range(5) for share in data.epoch(epoch, 0, 1)]
    assert ours == seen_by_keras(make(), 5, steps_per_epoch=steps, **batch)


def test_the_whole_batch_is_cut_without_a_copy():
    x, y = numbers(16)
    share = next(stream(lambda: iter([(x, y)])).epoch(0, 1, 2))
    assert share.offset == 4 and np.shares_memory(share.data[0], x)


def test_at_most_one_global_batch_is_read_ahead():
    taken = []

    def counting():
        for index, batch in enumerate(cuts(100, [4])):
            taken.append(index)
            yield batch

    shares = stream(counting()).epoch(0, 0, 1)
    next(shares)
    assert len(taken) <= 3


def test_nested_parts_and_weights_and_x_alone():
    def make():
        yield {"a": np.zeros((3, 2)), "b": [1, 2, 3]}, [np.zeros(3), np.zeros((3, 1))], np.ones(3)

    data = stream(make)
    f = "float32"
    assert data.element == (
        {"a": Spec((2,), f), "b": Spec((), "int64")},
        [Spec((), f), Spec((1,), f)],
        Spec((), f),
    )
    share = next(data.epoch(0, 1, 2))
    assert share.examples == 2 and share.data[0]["b"].tolist() == [2, 3]
    assert stream(lambda: iter([np.zeros((2, 3))])).element == Spec((3,), f)
    assert stream(lambda: iter([{"a": np.zeros((2, 3))}])).element == {"a": Spec((3,), f)}
    dataset = tf.data.Dataset.from_tensor_slices({"a": np.zeros((4, 3))})
    assert stream(dataset).element == {"a": Spec((3,), f)}
    assert next(stream(dataset).epoch(0, 0, 1)).data["a"].dtype == f


def test_dataset_lengths():
    assert (stream(slices(35)).steps_per_epoch, stream(slices(35)).examples) == (5, 35)
    assert (stream(slices(35).batch(4)).steps_per_epoch, stream(slices(35)).agreed) == (None, False)
    filtered = stream(slices(35).filter(lambda x, y: y % 2 == 0))
    assert filtered.steps_per_epoch is filtered.examples is None
    assert [len(b[1]) for b in read(filtered, size=4)] == [8, 8, 2]


def test_strings_come_as_objects_that_tensorflow_takes():
    words = tf.data.Dataset.from_tensor_slices(["a", "b", "c"])
    share = next(stream(words).epoch(0, 1, 2))
    assert tf.constant(share.data).numpy().tolist() == [b"b", b"c"]
    assert share.checksum != next(stream(words.shuffle(3, seed=1)).epoch(0, 1, 2)).checksum


@pytest.mark.parametrize("known", [True, False])
def test_a_dataset_that_shuffles_comes_in_the_orders_of_keras(known):
    def shuffled():
        keras.utils.set_random_seed(1)
        dataset = slices(24).shuffle(9, seed=1).batch(8)
        return dataset if known else dataset.filter(lambda *_: True)

    data = stream(shuffled(), batch=8)
    ours = [share.data[1].tolist() for epoch in range(3) for share in data.epoch(epoch, 0, 1)]
    assert ours == seen_by_keras((shuffled(),), 3)
    assert len({tuple(batch) for batch in ours}) == 9


def test_steps_per_epoch_reads_on():
    endless = stream(slices(10).repeat(), steps_per_epoch=3, batch=4)
    assert endless.steps_per_epoch == 3
    seen = [order(read(endless, epoch)) for epoch in range(3)]
    assert np.concatenate(seen).tolist() == [i % 10 for i in range(36)]


@pytest.mark.parametrize("n", [35, 32, 48])
def test_a_pass_that_ends_early_ends_its_epoch(n):
    """35: a tail; 32 and 48: the pass ends with a full batch, 48 with a full epoch."""
    data = stream(partial(cuts, n, [4]), steps_per_epoch=3)
    single = read(stream(partial(cuts, n, [4])))
    seen = [read(data, epoch) for epoch in range(4)]
    assert_same(seen[0] + seen[1], single)
    assert_same(seen[2], single[:3])
    assert seen[3]


def test_an_iterator_can_be_read_once():
    data = stream(cuts(35, [4]))
    assert len(read(data, 0)) == 5
    with pytest.raises(UsageError, match=r"generator is exhausted.*function"):
        next(data.epoch(1, 0, 1))
    counted = stream(cuts(35, [4]), steps_per_epoch=4)
    assert [len(read(counted, epoch)) for epoch in range(2)] == [4, 1]
    with pytest.raises(UsageError, match="is exhausted"):
        next(counted.epoch(2, 0, 1))


def test_py_dataset_shuffles_batches_by_seed_and_epoch():
    def orders(seed, epoch, size=1):
        sources = [stream(Batches(40, 4), shuffle=True, seed=seed) for _ in range(size)]
        return order(read(OnRanks(sources), epoch, size))

    assert sorted(orders(1, 0)) == list(range(40))
    assert orders(1, 0) == orders(1, 0, 3)
    assert len({tuple(orders(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    reading_on = stream(Batches(40, 4), shuffle=True, steps_per_epoch=5)
    assert [order(read(reading_on, epoch)) for epoch in (0, 1)] == [orders(1, 0), orders(1, 1)]


def test_py_dataset_hooks_and_endless():
    dataset = Batches(20, 5)
    data = stream(dataset)
    read(data, 0)
    read(data, 1)
    assert dataset.calls == ["begin", "end"] * 2
    endless = stream(Batches(20, 5, length=None), steps_per_epoch=2)
    assert order(read(endless, 0) + read(endless, 1)) == [i % 20 for i in range(32)]


def test_checksums_tell_streams_apart():
    def checksums(data):
        return [share.checksum for share in stream(data).epoch(0, 0, 2)]

    same = checksums(slices(40).shuffle(40, seed=3))
    assert same == checksums(slices(40).shuffle(40, seed=3))
    other = checksums(slices(40).shuffle(40, seed=4))
    assert all(a != b for a, b in zip(same, other, strict=True))
    images = np.random.default_rng(0).random((64, 100, 100, 3), np.float32)
    swapped = images.copy()
    swapped[[3, 40]] = swapped[[40, 3]]
    noisy = images + np.float32(1e-6)
    one, two, three = (
        [s.checksum for s in stream(partial(iter, [a]), 64).epoch(0, 0, 1)]
        for a in (images, swapped, noisy)
    )
    assert one != two and one != three


def test_class_weights_of_streams():
    weights = dict.fromkeys(range(20), 2.0) | {3: 5.0}
    sources = [stream(slices(20), class_weight=weights) for _ in range(2)]
    assert sources[0].element[2] == Spec((), "float32")
    seen = np.concatenate([batch[2] for batch in read(OnRanks(sources), 0, 2)])
    np.testing.assert_array_equal(seen, [2, 2, 2, 5] + [2] * 16)


def test_tf_data_keeps_to_the_ranks_threads():
    from hvdtrain.data import tf_dataset

    options = tf_dataset.options_of(slices(3), 3)
    assert options.autotune.enabled is False and options.deterministic
    assert options.threading.private_threadpool_size == 3
    wanted = tf.data.Options()
    wanted.autotune.enabled = True
    wanted.threading.private_threadpool_size = 9
    dataset = slices(3).with_options(wanted)
    merged = dataset.with_options(tf_dataset.options_of(dataset, 3)).options()
    assert merged.autotune.enabled and merged.threading.private_threadpool_size == 9


def generated(shape):
    spec = (tf.TensorSpec(shape), tf.TensorSpec(shape and shape[:1]))
    return tf.data.Dataset.from_generator(lambda: iter([]), output_signature=spec)


def test_is_batched():
    examples, batches = slices(12), slices(12).batch(3)
    for dataset in (
        batches,
        batches.shuffle(2).repeat().map(lambda x, y: (x, y)).prefetch(1),
        examples.batch(3, num_parallel_calls=2),
        examples.padded_batch(3),
        batches.unbatch().batch(2),
        batches.rebatch(2),
        tf.data.Dataset.zip((batches, batches)),
        batches.concatenate(batches),
        tf.data.TFRecordDataset([]).batch(2).map(lambda x: tf.reshape(x, (-1, 1))),
    ):
        assert is_batched(dataset) is True
    for dataset in (
        examples,
        batches.unbatch(),
        examples.shuffle(4, seed=1).cache().take(5).filter(lambda x, y: True),
        tf.data.Dataset.zip((examples, examples)),
        tf.data.TFRecordDataset([]),
    ):
        assert is_batched(dataset) is False
    # As Keras takes them where nothing tells.
    assert is_batched(generated((None, 4))) is True
    assert is_batched(generated((None, 4)), [2]) is True
    assert is_batched(generated((4, 4)), [3]) is False
    assert is_batched(generated((4, 4)), [7]) is True
    different = tf.TensorSpec((28, 28)), tf.TensorSpec((10,))
    assert is_batched(tf.data.Dataset.from_generator(int, output_signature=different)) is False
    scalars = tf.data.Dataset.from_generator(int, output_signature=tf.TensorSpec(()))
    assert is_batched(scalars) is False


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (lambda: slices(3), {"y": [1]}, "y was passed together with a tf.data.Dataset"),
        (lambda: Batches(3, 1), {"y": [1]}, "y was passed together with a PyDataset Batches"),
        (lambda: cuts(3, [1]), {"sample_weight": [1]}, "sample_weight was passed together"),
        (lambda: slices(3).repeat(), {}, "tf.data.Dataset never ends: pass steps_per_epoch"),
        (lambda: Batches(3, 1, None), {}, "never ends: pass steps_per_epoch"),
        (lambda: generated(None), {}, "yields x with an unknown number of dimensions"),
        (lambda: tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], []])), {}, "a Ragged"),
        (lambda: cuts(0, [1]), {}, "generator is empty"),
        (lambda: partial(cuts, 0, [1]), {}, "is empty"),
        (lambda: slices(3).take(0), {}, "tf.data.Dataset is empty"),
        (lambda: slices(3).take(0), {"steps_per_epoch": 2}, "tf.data.Dataset is empty"),
        (lambda: iter([3]), {}, "first batch of the list_iterator is a int"),
        (lambda: iter(["x"]), {}, "first batch of the list_iterator is a str"),
        (lambda: iter([None]), {}, "first batch of the list_iterator is a NoneType"),
        (lambda: iter([(1, 2)]), {}, "first batch of the list_iterator: x is a single int"),
        (lambda: iter([({"a": X, "b": None}, Y)]), {}, r"x\['b'\] is None"),
        (lambda: iter([(X, Y[:2])]), {}, "batch 0 of the list_iterator: .* x has 6, y has 2"),
        (lambda: iter([(X, Y), (X, None)]), {}, "differ: one has examples of .* another of"),
        (lambda: iter([(X, Y), (X.astype(int), Y)]), {}, r"int64\[1\]"),
        (lambda: lambda: 3, {}, "returned a int"),
        (lambda: partial(iter, [(X, Y)]), {"global_batch_size": 1}, "smaller than the number"),
    ],
)
def test_errors_say_what_is_wrong(data, options, message):
    with pytest.raises(UsageError, match=message):
        made = stream(data(), **{"batch": options.pop("global_batch_size", 8), **options})
        list(made.epoch(0, 0, 2))


X, Y = numbers(6)


def test_loaders_of_other_libraries_are_refused():
    loader = type(
        "DataLoader", (), {"__iter__": lambda self: iter([]), "__module__": "torch.utils"}
    )
    with pytest.raises(
        UsageError, match=r"torch.utils.DataLoader, which cannot .* tf.data.Dataset"
    ):
        stream(loader())


def test_a_stream_that_fails_keeps_its_own_error():
    def broken():
        yield X, Y
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        list(stream(broken()).epoch(0, 0, 1))
    with pytest.raises(ZeroDivisionError):
        list(stream(Failing(12, 2, workers=2)).epoch(0, 0, 1))


class Failing(Batches):
    def __getitem__(self, index):
        return 1 / (3 - index) and super().__getitem__(index)
