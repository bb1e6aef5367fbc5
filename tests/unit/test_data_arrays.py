"""Arrays as a source: who gets which example, whatever the number of workers."""

import subprocess
import sys
from itertools import pairwise

import h5py
import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.data import Spec, make_source, split, validation_split
from hvdtrain.data.structures import concatenate, sample
from hvdtrain.errors import UsageError


def numbers(n):
    """n examples that tell which they are, in x and in y."""
    return np.arange(n, dtype=np.float32)[:, None], np.arange(n)


def source(n, batch, **options):
    options = {"shuffle": True, "seed": 1, **options}
    return make_source(*numbers(n), global_batch_size=batch, **options)


def read(source, epoch=0, size=1):
    """The epoch's global batches put together from all ranks' shares, checking each share."""
    ranks = [list(source.epoch(epoch, rank, size)) for rank in range(size)]
    assert len({len(shares) for shares in ranks}) == 1
    batches = []
    for shares in zip(*ranks, strict=True):
        assert len({(share.global_examples, share.checksum) for share in shares}) == 1
        total = 0
        for rank, share in enumerate(shares):
            assert share.examples == np.diff(split(share.global_examples, rank, size))[0]
            assert len(share.data[0]) == max(share.examples, 1)
            assert share.offset == total or share.examples == 0
            total += share.examples
        assert total == shares[0].global_examples
        batches.append(concatenate([s.data for s in shares if s.examples]))
        members = batches[-1][-1].tolist() if batches[-1][-1].ndim == 1 else None
        for share in shares:
            if share.examples == 0 and members is not None:
                assert share.data[-1].tolist()[0] in members
    return batches


def order(batches):
    return [int(value) for batch in batches for value in batch[1]]


@given(n=st.integers(0, 10**9), size=st.integers(1, 500))
def test_split_is_contiguous_and_even(n, size):
    parts = [split(n, rank, size) for rank in range(size)]
    assert parts[0][0] == 0 and parts[-1][1] == n
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    lengths = {end - begin for begin, end in parts}
    assert max(lengths) - min(lengths) <= 1


shapes = st.integers(1, 7).flatmap(
    lambda size: st.tuples(st.just(size), st.integers(size, 20), st.integers(1, 60))
)


@settings(max_examples=60)
@given(shape=shapes, epoch=st.integers(0, 5), shuffle=st.booleans(), steps=st.integers(0, 6))
def test_shares_make_up_the_batch_of_one_worker(shape, epoch, shuffle, steps):
    size, batch, n = shape
    data = source(n, batch, shuffle=shuffle, steps_per_epoch=steps or None)
    together, alone = read(data, epoch, size), read(data, epoch, 1)
    assert len(together) == len(alone) <= data.steps_per_epoch == (steps or -(-n // batch))
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])
        np.testing.assert_array_equal(ours[0][:, 0], ours[1])
    assert all(len(b[1]) == batch for b in together[:-1])
    if not steps:
        assert sorted(order(together)) == list(range(n))
        assert shuffle or order(together) == list(range(n))


def test_order_depends_on_seed_and_epoch():
    orders = {
        (seed, epoch): tuple(order(read(source(50, 8, seed=seed), epoch)))
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    assert tuple(order(read(source(50, 8, seed=2), 1, 3))) == orders[2, 1]


@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_per_epoch_goes_on_where_the_last_epoch_ended(shuffle):
    data = source(18, 4, shuffle=shuffle, steps_per_epoch=2)
    seen = [order(read(data, epoch, 2)) for epoch in range(6)]
    assert [len(one) for one in seen] == [8, 8, 2] * 2
    whole = source(18, 4, shuffle=shuffle)
    passes = order(read(whole, 0)) + order(read(whole, 1))
    assert [value for one in seen for value in one] == passes
    assert order(read(data, 3)) == seen[3], "an epoch is a pure function of its number"


def test_batch_larger_than_the_data():
    assert [len(b[1]) for b in read(source(5, 8), size=2)] == [5]
    with pytest.warns(UserWarning, match="the data ran out: the epoch ends after 1 of 2 steps"):
        assert [len(b[1]) for b in read(source(5, 12, steps_per_epoch=2), size=2)] == [5]


def test_idle_ranks_get_one_real_example_of_the_batch():
    shares = [list(source(10, 8).epoch(0, rank, 5))[-1] for rank in range(5)]
    assert [share.examples for share in shares] == [0, 0, 1, 0, 1]
    assert all(share.global_examples == 2 and len(share.data[1]) == 1 for share in shares)


def test_unshuffled_shares_are_views_and_shuffled_copy_the_share_only():
    x, y = numbers(100)
    share = next(make_source(x, y, global_batch_size=10, shuffle=False, seed=0).epoch(0, 1, 2))
    assert np.shares_memory(share.data[0], x) and np.shares_memory(share.data[1], y)
    share = next(make_source(x, y, global_batch_size=10, shuffle=True, seed=0).epoch(0, 1, 2))
    assert share.data[0].base is None and len(share.data[0]) == 5


def test_floats_come_in_floatx_and_the_element_says_so():
    x = {"a": np.zeros((6, 2, 3)), "b": [np.zeros((6,), "int8"), np.array(list("abcdef"))]}
    data = make_source(
        x, np.zeros((6, 1), "float16"), np.ones(6), global_batch_size=4, shuffle=True, seed=0
    )
    assert data.element == (
        {"a": Spec((2, 3), "float32"), "b": [Spec((), "int8"), Spec((), "str32")]},
        Spec((1,), "float32"),
        Spec((), "float32"),
    )
    share = next(data.epoch(0, 0, 1))
    assert share.data[0]["a"].dtype == share.data[1].dtype == share.data[2].dtype == "float32"
    assert share.data[0]["b"][1].dtype == "<U1"


def test_tensors_lists_and_frames_are_arrays():
    pandas = pytest.importorskip("pandas")
    x, y = numbers(9)
    expected = read(make_source(x, y, global_batch_size=4, shuffle=True, seed=3))
    frame = pandas.DataFrame({"only": x[:, 0]})
    for given_x, given_y in [
        (keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)),
        (x.tolist(), y.tolist()),
        (frame, list(y)),
    ]:
        batches = read(make_source(given_x, given_y, global_batch_size=4, shuffle=True, seed=3))
        for ours, theirs in zip(batches, expected, strict=True):
            np.testing.assert_array_equal(ours[0], theirs[0])
            np.testing.assert_array_equal(ours[1], theirs[1])
    assert make_source(
        frame, frame["only"], frame["only"], global_batch_size=4, shuffle=False, seed=0
    ).element == (Spec((1,), "float32"), Spec((1,), "float32"), Spec((), "float32"))


def test_columns_of_several_types_are_one_array():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"float": [1.5, 2.5], "flag": [True, False], "count": [3, 4]})
    rows = [[1.5, 1, 3], [2.5, 0, 4]]
    for data in (frame, frame.astype({"count": "Int64", "flag": "boolean", "float": "Float32"})):
        (share,) = make_source(data, global_batch_size=2, shuffle=False, seed=0).epoch(0, 0, 1)
        assert share.data.dtype == "float32" and share.data.tolist() == rows


def test_a_tuple_is_the_data_and_a_list_is_inputs():
    x, y = numbers(6)
    options = {"global_batch_size": 3, "shuffle": False, "seed": 0}
    assert len(make_source((x, y), **options).element) == 2
    assert len(make_source((x, y, None), **options).element) == 2
    assert len(make_source((x, y, y), **options).element) == 3
    assert len(make_source((x, y), sample_weight=y, **options).element) == 3
    assert make_source(x, y, [y], **options).element[2] == [Spec((), "int64")]
    assert make_source((x,), **options).element == Spec((1,), "float32")
    (inputs,) = make_source([x, y], **options).element
    assert isinstance(inputs, list) and len(inputs) == 2
    assert next(make_source([x, y], **options).epoch(0, 0, 1)).data[0][1].tolist() == [0, 1, 2]


def test_memory_mapped_arrays_are_read_by_share(tmp_path):
    np.save(tmp_path / "x.npy", numbers(50)[0])
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = make_source(mapped, np.arange(50), global_batch_size=20, shuffle=False, seed=0)
    assert np.shares_memory(next(data.epoch(0, 0, 2)).data[0], mapped)


X, Y = numbers(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": X, "y": Y[:7]}, r"x has 8, y has 7"),
        ({"x": {"a": X, "b": [X, X[:3]]}, "y": Y}, r"x\['b'\]\[1\] has 3"),
        ({"x": X, "y": Y, "sample_weight": Y[:2]}, "sample_weight has 2"),
        ({"x": X, "sample_weight": Y}, "without y"),
        ({"x": X[:0], "y": Y[:0]}, "empty"),
        ({"x": [], "y": Y}, "x is an empty list"),
        ({"x": {}, "y": Y}, "x is an empty dict"),
        ({"x": None}, "x is None"),
        ({"x": {"a": X, "b": None}, "y": Y}, r"x\['b'\] is None"),
        ({"x": 3, "y": Y}, "x is a single int"),
        ({"x": "file.npz"}, "x is a single str"),
        ({"x": (1, 2)}, "x is a single int"),
        ({"x": (X, Y, Y, Y)}, "tuple of 4"),
        ({"x": (X, Y, Y), "sample_weight": Y}, "twice"),
        ({"x": [X, object()], "y": Y}, r"x\[1\] is a object"),
        ({"x": [[1, 2], [3]], "y": [1, 2]}, "cannot be turned into one array"),
        ({"x": np.array([[1], [1, 2]], dtype=object), "y": [1, 2]}, "Python objects"),
        ({"x": np.array([["a", 1]], dtype=object), "y": [1]}, r"x holds Python objects \(int\)"),
        ({"x": np.array(["2020-01-01"], "datetime64[s]"), "y": [1]}, "x holds values of type date"),
        ({"x": tf.ragged.constant([[1], [1, 2]]), "y": [1, 2]}, "x is a RaggedTensor.*to_tensor"),
        ({"x": tf.sparse.eye(2), "y": [1, 2]}, "x is a SparseTensor.*to_dense"),
        (
            {"x": X, "y": {"a": Y, "b": Y}, "sample_weight": {"a": Y}},
            r"sample_weight has \['a'\], and y has \['a'\], \['b'\]: pass weights, or None, for each",
        ),
        ({"x": object()}, "cannot be read"),
        ({"x": X, "y": Y, "global_batch_size": 0}, "global_batch_size=0: pass an integer"),
        ({"x": X, "y": Y, "global_batch_size": 2.5}, "global_batch_size=2.5: pass an integer"),
        ({"x": X, "y": Y, "steps_per_epoch": 0}, "steps_per_epoch=0: pass an integer"),
        ({"x": X, "y": Y, "class_weight": [1.0]}, "class_weight is a list"),
        ({"x": X, "y": Y, "class_weight": {"0": 1.0}}, "the key '0'; classes are integers"),
        ({"x": X, "class_weight": {0: 1.0}}, "no y"),
        ({"x": X, "y": [Y, Y], "class_weight": {0: 1.0}}, "y has several"),
    ],
)
def test_errors_say_what_is_wrong(options, message):
    with pytest.raises(UsageError, match=message):
        make_source(**{"global_batch_size": 4, "shuffle": True, "seed": 0, **options})


def test_batch_smaller_than_the_number_of_workers():
    with pytest.raises(UsageError, match=r"global_batch_size 2 is smaller than .* workers, 3"):
        source(10, 2).epoch(0, 0, 3)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([0, 2, 1, 2, 2]),
        np.array([[0.0], [2.0], [1.0], [2.0], [1.0]]),
        np.eye(3)[[2, 1, 0, 0, 1]],
    ],
)
def test_class_weights_are_those_of_keras(labels):
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    weights = {0: 1.0, 1: 0.25, 2: 7.0}
    options = {"global_batch_size": 5, "shuffle": False, "seed": 0, "class_weight": weights}
    (share,) = make_source(np.zeros((5, 1)), labels, **options).epoch(0, 0, 1)
    expected = class_weight_to_sample_weights(labels, weights)
    np.testing.assert_array_equal(share.data[2], expected)
    assert share.data[2].dtype == expected.dtype
    given_weights = np.arange(5.0)[:, None]
    (share,) = make_source(np.zeros((5, 1)), labels, given_weights, **options).epoch(0, 0, 1)
    np.testing.assert_array_equal(share.data[2], expected[:, None] * given_weights)


def test_validation_split_takes_the_last_part():
    x, y = numbers(10)
    train, validation = validation_split({"a": x}, y, None, 0.25)
    assert train[1].tolist() == list(range(7)) and validation[1].tolist() == [7, 8, 9]
    assert np.shares_memory(validation[0]["a"], x)
    assert make_source(validation, global_batch_size=2, shuffle=False, seed=0).examples == 3


@pytest.mark.parametrize(
    ("x", "fraction", "message"),
    [
        (X, 1.0, "between 0 and 1"),
        (X, 0.01, None),
        (X[:1], 0.5, "nothing to train on"),
        (iter([X]), 0.5, "arrays only"),
    ],
)
def test_validation_split_errors(x, fraction, message):
    if message is None:
        assert len(validation_split(x, None, None, fraction)[1][0]) == 1
        return
    with pytest.raises(UsageError, match=message):
        validation_split(x, None, None, fraction)


def test_importing_brings_neither_tensorflow_nor_horovod():
    code = "import sys, hvdtrain.data; print({'tensorflow', 'keras', 'horovod'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "set()", result.stderr


def test_a_class_without_a_weight_has_weight_1():
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    weights = {1: 3.0, 9: 2.0}
    data = source(8, 4, shuffle=False, class_weight=weights)
    seen = np.concatenate([batch[2] for batch in read(data)])
    np.testing.assert_array_equal(seen, class_weight_to_sample_weights(np.arange(8), weights))


class Counted:
    """An array on disk that says how many rows were read; rows in ascending order only, as h5py."""

    def __init__(self, array):
        self.array, self.read = array, 0
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, rows):
        found = self.array[rows]
        assert isinstance(rows, slice) or (np.diff(rows) > 0).all()
        self.read += len(found)
        return found


def h5(array, folder):
    file = h5py.File(folder / "data.h5", "w")
    return file.create_dataset("x", data=array)


def memmap(array, folder):
    np.save(folder / "data.npy", array)
    return np.load(folder / "data.npy", mmap_mode="r")


LAZY = {
    "csr": lambda array, _: scipy.sparse.csr_matrix(array),
    "coo": lambda array, _: scipy.sparse.coo_array(array),
    "counted": lambda array, _: Counted(array),
    "h5py": h5,
    "memmap": memmap,
}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", LAZY)
def test_rows_are_read_when_they_are_needed(kind, size, shuffle, tmp_path):
    x = np.random.default_rng(0).random((35, 6)) * (np.arange(6) % 2)
    y = np.arange(35)
    options = {"global_batch_size": 8, "shuffle": shuffle, "seed": 3}
    lazy = make_source(LAZY[kind](x, tmp_path), y, **options)
    expected = read(make_source(x, y, **options), 1)
    for ours, theirs in zip(read(lazy, 1, size), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert type(a) is np.ndarray and a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert lazy.element == (Spec((6,), "float32"), Spec((), "int64"))
    # Evenly spaced rows, of each another column.
    assert set(sample(lazy.data)["x"]) <= set(x.ravel().tolist())


def test_a_rank_reads_only_its_rows():
    disk = Counted(np.zeros((64, 3), "float32"))
    train, _ = validation_split(disk, np.zeros(64), None, 0.25)
    data = make_source(train, global_batch_size=16, shuffle=True, seed=0)
    assert disk.read == 0
    list(data.epoch(0, 1, 4))
    assert disk.read == 12
