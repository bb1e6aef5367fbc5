"""Examples in files: the global batches of arrays, and no rank decodes what it does not train."""

import gzip
import os
import resource
import struct
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_data_arrays import order, read, source

from hvdtrain.data import Spec, from_files, make_source
from hvdtrain.errors import UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """35 numbers: in PNG files, and in three TFRecord files of 12, 0 and 23."""
    path = tmp_path_factory.mktemp("files")
    for number in range(35):
        image = tf.fill([2, 3, 1], tf.cast(number, tf.uint8))
        (path / f"{number:02d}.png").write_bytes(tf.io.encode_png(image).numpy())
    for name, numbers in (("a", range(12)), ("b", ()), ("c", range(12, 35))):
        with tf.io.TFRecordWriter(str(path / f"{name}.tfrecord")) as writer:
            for number in numbers:
                writer.write(tf.io.serialize_tensor(tf.constant(number)).numpy())
    return path


def image(path):
    pixels = tf.io.decode_png(tf.io.read_file(path), channels=1)
    pixels.set_shape([2, 3, 1])
    return tf.cast(pixels, tf.float64), tf.cast(pixels[0, 0, 0], tf.int64)


def record(serialized):
    number = tf.io.parse_tensor(serialized, tf.int32)
    number.set_shape([])
    return tf.cast([number], tf.float32), tf.cast(number, tf.int64)


def files(folder, kind):
    if kind == "png":
        return from_files(f"{folder}/*.png", image)
    return from_files(str(folder / "*.tfrecord"), record)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["png", "records"]),
    batch=st.integers(1, 40),
    shuffle=st.booleans(),
    steps=st.one_of(st.none(), st.integers(1, 5)),
    size=st.integers(1, 8),
)
# The last batch has 8 examples: 2 for the third rank, which has 1 of the 9 before.
@example(kind="png", batch=9, shuffle=False, steps=None, size=6)
def test_the_batches_of_arrays_for_any_number_of_ranks(folder, kind, batch, shuffle, steps, size):
    size = min(size, batch)
    options = {"shuffle": shuffle, "seed": 1, "steps_per_epoch": steps}
    found = make_source(files(folder, kind), global_batch_size=batch, threads=2, **options)
    expected = source(35, batch, **options)
    assert found.steps_per_epoch == expected.steps_per_epoch
    for epoch in (0, 1):
        ours = read(found, epoch, size)
        assert [len(b[1]) for b in ours] == [len(b[1]) for b in read(expected, epoch)]
        assert order(ours) == order(read(expected, epoch))
        for x, y in ours:
            assert x.dtype == np.float32
            assert (x.reshape(len(y), -1) == y[:, None]).all()


@pytest.mark.parametrize("kind", ["png", "records"])
def test_a_rank_decodes_its_own_examples_only(folder, kind):
    seen = []

    def counted(function):
        def call(value):
            x, y = function(value)
            (y,) = tf.py_function(lambda y: seen.append(int(y)) or y, [y], [tf.int64])
            y.set_shape([])
            return x, y

        return call

    given = files(folder, kind)
    function = counted(given.read)
    data = make_source(from_files(given.paths, function), global_batch_size=8, shuffle=True, seed=2)
    own = []
    for rank in range(2):
        seen.clear()
        own.append(sorted(np.concatenate([s.data[1] for s in data.epoch(0, rank, 2)]).tolist()))
        assert sorted(seen) == own[-1]
    assert sorted(own[0] + own[1]) == list(range(35))


def test_elements_labels_and_weights(folder):
    data = make_source(
        files(folder, "png"), global_batch_size=8, shuffle=False, seed=0, class_weight={3: 2.0}
    )
    f = "float32"
    assert data.element == (Spec((2, 3, 1), f), Spec((), "int64"), Spec((), f))
    assert next(data.epoch(0, 0, 1)).data[2].tolist() == [1, 1, 1, 2, 1, 1, 1, 1]

    labels = np.arange(35) ** 2
    labelled = from_files(
        f"{folder}/*.png", lambda path, label: (image(path)[1], label), labels=labels
    )
    data = make_source(labelled, global_batch_size=8, shuffle=True, seed=0)
    for x, y in read(data, 0, 3):
        assert (x**2 == y).all()

    alone = make_source(
        from_files(f"{folder}/*.png", lambda path: image(path)[0]),
        global_batch_size=8,
        shuffle=False,
        seed=0,
    )
    assert alone.element == Spec((2, 3, 1), f)
    assert next(alone.epoch(0, 1, 2)).data.shape == (4, 2, 3, 1)


def broken(folder, name, change):
    whole = (folder / "c.tfrecord").read_bytes()
    path = folder / name
    path.write_bytes(change(whole))
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: from_files(f"{f}/*.jpg", image), r"no file matches '.*\.jpg'"),
        (lambda f: from_files([f / "a.tfrecord", f / "x"], record), "no such file: .*x"),
        (lambda f: from_files(f"{f}/*.png", image, labels=[1, 2]), r"labels has shape \(2,\)"),
        (lambda f: from_files(f"{f}/a.tfrecord", record, labels=[1]), "are in the records"),
        (lambda f: from_files(f / "01.png", image, labels=[{}]), "labels holds Python objects"),
        (lambda f: from_files(f / "b.tfrecord", record), "contain no records"),
        (lambda f: from_files(broken(f, "cut.tfrecord", lambda b: b[:-3]), record), "is truncated"),
        (
            lambda f: from_files(broken(f, "no.tfrecord", lambda b: b"x" * 50), record),
            "is truncated",
        ),
        (lambda f: from_files(broken(f, "gz.tfrecord", gzip.compress), record), "is compressed"),
        (
            lambda f: from_files(
                f / "01.png", lambda path: tf.numpy_function(len, [path], tf.int64)
            ),
            "dimensions",
        ),
    ],
)
def test_errors_say_what_is_wrong(folder, tmp_path, make, message):
    (tmp_path / "c.tfrecord").write_bytes((folder / "c.tfrecord").read_bytes())
    for name in ("a.tfrecord", "b.tfrecord", "01.png"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(UsageError, match=message):
        _ = make_source(make(tmp_path), global_batch_size=4, shuffle=False, seed=0).element


def test_a_flipped_bit_is_noticed(folder, tmp_path):
    content = bytearray((folder / "c.tfrecord").read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    content[12 + length // 2] ^= 1
    (tmp_path / "flipped.tfrecord").write_bytes(content)
    with pytest.raises(UsageError, match=r"flipped.tfrecord: the record at byte 0 cannot be read"):
        examples(tmp_path / "flipped.tfrecord", record)


def test_a_file_that_shrinks_is_named(folder, tmp_path):
    path = tmp_path / "c.tfrecord"
    path.write_bytes((folder / "c.tfrecord").read_bytes())
    data = make_source(from_files(path, record), global_batch_size=4, shuffle=False, seed=0)
    os.truncate(path, 200)
    with pytest.raises(UsageError, match=r"c.tfrecord: the record at byte .* was changed"):
        list(data.epoch(0, 0, 1))


def examples(paths, read):
    data = make_source(from_files(paths, read), global_batch_size=4, shuffle=False, seed=0)
    return np.concatenate([share.data[1] for share in data.epoch(0, 0, 1)]).tolist()


@pytest.mark.parametrize(
    "name", ["a[1].tfrecord", "a?\udcff.tfrecord", "a.tfrecord-00003-of-00008"]
)
def test_odd_names_of_records(folder, tmp_path, name):
    (tmp_path / name).write_bytes((folder / "a.tfrecord").read_bytes())
    assert examples(tmp_path / name, record) == list(range(12))


@pytest.mark.parametrize("name", ["[1].png", "?\udcff.png"])
def test_odd_names_of_pictures(folder, tmp_path, name):
    (tmp_path / name).write_bytes((folder / "07.png").read_bytes())
    assert examples(tmp_path / name, image) == [7]


def test_more_files_of_records_than_may_be_open(folder, tmp_path):
    for number in range(1100):
        (tmp_path / f"{number}.tfrecord").symlink_to(folder / "a.tfrecord")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        assert len(examples(str(tmp_path / "*.tfrecord"), record)) == 12 * 1100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_random_numbers_that_differ_with_the_number_of_ranks(folder):
    layer = keras.layers.RandomFlip(seed=1)
    generator = tf.random.Generator.from_seed(1)

    def made(change):
        def read(path):
            pixels, label = image(path)
            return change(tf.cast(pixels, tf.float32), path), label

        return make_source(
            from_files(f"{folder}/*.png", read), global_batch_size=8, shuffle=True, seed=1
        )

    drawing = {
        "RandomUniform": lambda x, path: tf.image.random_brightness(x, 0.5),
        "RngReadAndSkip": lambda x, path: x + generator.normal(x.shape),
        "AssignVariableOp": lambda x, path: layer(x, training=True),
    }
    for operation, change in drawing.items():
        source = made(change)
        assert f"draws random numbers ({operation}) whose order differs" in source.unrepeatable
        with pytest.warns(UserWarning, match="other ones with 2 workers than with one: use the"):
            source.epoch(0, 0, 2)

    def of_the_name(x, path):
        number = tf.strings.to_hash_bucket_fast(path, 2**31)
        return tf.image.stateless_random_brightness(x, 0.5, tf.stack([number, 1]))

    repeatable = made(of_the_name)
    assert not repeatable.unrepeatable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one, same in zip(read(repeatable, 0, 2), read(repeatable, 0, 1), strict=True):
            np.testing.assert_array_equal(one[0], same[0])


def test_ranks_compare_what_their_files_hold(folder, tmp_path):
    path = tmp_path / "c.tfrecord"
    path.write_bytes((folder / "c.tfrecord").read_bytes())

    def sample(path):
        return make_source(
            from_files(path, record), global_batch_size=4, shuffle=False, seed=0
        ).sample()

    assert sample(path) == sample(folder / "c.tfrecord")
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(13, 36):
            writer.write(tf.io.serialize_tensor(tf.constant(number)).numpy())
    assert sample(path) != sample(folder / "c.tfrecord")
