"""`hvdtrain run --adopt`: what a rank does to a script's batches and seeds, as far as one process shows it."""

from __future__ import annotations

import itertools
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from hvdtrain.adopt.batches import batch_examples
from hvdtrain.adopt.evaluations import Evaluation
from hvdtrain.adopt.keras_order import KerasItems, ScriptsSeed, in_keras_order
from hvdtrain.adopt.replayed import Replayed
from hvdtrain.adopt.script_calls import (
    late_settings_left_out,
    mirrored_by_workers,
    random_maps_in_order,
    same_seeds,
)
from hvdtrain.cli.command_table import main
from hvdtrain.errors import UsageError
from hvdtrain.launch.rank_program import program_given, rank_command


def silent(what: str, how: str) -> None: ...


NUMBERS = np.arange(10.0)[:, None]


DATASET = tf.data.Dataset.from_tensor_slices((NUMBERS, NUMBERS))


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return NUMBERS[:7], NUMBERS[:7]


@pytest.mark.parametrize(
    ("data", "given", "size"),
    [
        (NUMBERS, None, 32),
        (NUMBERS, 5, 5),
        (DATASET.batch(3), None, 3),
        (DATASET.batch(4, drop_remainder=True).prefetch(1), None, 4),
        (DATASET.shuffle(5).batch(6).map(lambda x, y: (x + 1, y)).repeat(), None, 6),
        (Batches(), None, 7),
        (([NUMBERS[:8], NUMBERS[:8]] for _ in range(3)), None, 8),
        ((({"a": NUMBERS[:2]}, NUMBERS[:2]) for _ in range(3)), None, 2),
    ],
)
def test_the_global_batch_is_that_of_the_script(data: Any, given: int | None, size: int) -> None:
    assert batch_examples(data, given, None)[0] == size


def test_nothing_of_a_generator_is_lost() -> None:
    _, again = batch_examples(([NUMBERS[:n]] for n in (1, 2, 3)), None, None)
    assert [len(batch[0]) for batch in again] == [1, 2, 3]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DATASET, "not batched"),
        (iter(()), "yields nothing"),
        (iter([1.0]), "no arrays"),
        (DATASET.batch(3).concatenate(DATASET.batch(4)), "batch size of the tf.data.Dataset"),
        (DATASET.batch(4).rebatch(2), "batch size of the tf.data.Dataset"),
        (
            DATASET.batch(4).flat_map(lambda *batch: tf.data.Dataset.from_tensors(batch)),
            "batch size of",
        ),
    ],
)
def test_unknown_batches(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batch_examples(data, None, None)


def test_what_was_read_before_the_training_comes_again() -> None:
    begun: list[bool] = []
    numbers = Replayed(iter(range(6)), lambda: bool(begun))
    assert list(itertools.islice(numbers, 3)) == [0, 1, 2]
    assert list(itertools.islice(numbers.again(), 4)) == [0, 1, 2, 3]
    trained = Replayed(iter(range(6)), lambda: bool(begun))
    reading = iter(trained)
    next(reading)
    begun.append(True)
    assert list(itertools.islice(reading, 2)) == [1, 2]
    assert list(trained) == [0, 1], "that Keras had looked at"
    assert list(trained.again()) == [3, 4, 5]


class Seen(keras.Model):
    """Notes the examples of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen: list[float] = []

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        tf.py_function(lambda x: self.seen.extend(x.numpy().ravel()), [data[0]], [])
        return super().train_step(data)


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_the_order_of_the_examples_is_kerass(shuffle: Any) -> None:
    keras.utils.set_random_seed(3)
    model = Seen()
    model.compile("sgd", "mse")
    model.fit(NUMBERS, NUMBERS, batch_size=4, epochs=3, verbose=0, shuffle=shuffle)
    x, y, weights = in_keras_order((NUMBERS, -NUMBERS, NUMBERS[:, 0] * 2), 4, shuffle)
    assert model.seen == list(x.ravel()) * 3 != list(NUMBERS.ravel()) * 3
    assert np.array_equal(-x, y) and np.array_equal(2 * x[:, 0], weights)


class Pairs(keras.utils.PyDataset):
    """Two numbers in each item, or fewer in the last one."""

    def __init__(self, numbers: np.ndarray = NUMBERS) -> None:
        super().__init__()
        self._numbers = numbers

    def __len__(self) -> int:
        return -(-len(self._numbers) // 2)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._numbers[2 * index : 2 * index + 2]
        return rows, rows


@pytest.mark.parametrize("numbers", [NUMBERS, NUMBERS[:9]], ids=["equal", "a shorter one"])
def test_the_order_of_the_items_of_a_py_dataset_is_kerass(numbers: np.ndarray) -> None:
    model = Seen()
    model.compile("sgd", "mse")
    random.seed(3)
    model.fit(Pairs(numbers), epochs=3, verbose=0)
    random.seed(3)
    shuffled = KerasItems(Pairs(numbers), shuffle=True)
    found = []
    for _ in range(3):
        shuffled.on_epoch_begin()
        assert shuffled.num_batches == 5
        found += [x for index in range(5) for x in shuffled[index][0].ravel()]
        shuffled.on_epoch_end()
    assert model.seen == found != list(numbers.ravel()) * 3


def test_a_script_sets_its_seed() -> None:
    seed = ScriptsSeed()
    with seed.watched():
        assert not seed.is_set
        keras.utils.set_random_seed(1)
    assert seed.is_set


def draws() -> list[float]:
    np.random.seed()
    random.seed(None)
    rngs = np.random.default_rng(), np.random.default_rng(seed=None), np.random.default_rng(7)
    return [np.random.rand(), random.random(), *(rng.random() for rng in rngs)]


def test_generators_without_a_seed_are_the_same_on_all_ranks() -> None:
    found = []
    for _ in range(2):
        with same_seeds(0, silent):
            found.append(draws())
    assert found[0] == found[1]
    assert len(set(found[0])) == 5
    assert found[0][-1] == np.random.default_rng(7).random()


@pytest.mark.parametrize("threads", [None, tf.data.AUTOTUNE, 4])
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + tf.random.uniform([], dtype=tf.double),
        lambda x: tf.numpy_function(lambda v: v + np.random.rand(), [x], tf.double),
    ],
)
def test_random_maps_yield_the_same_on_all_ranks(threads: int | None, draw: Any) -> None:
    found = []
    for _ in range(3):
        keras.utils.set_random_seed(5)
        with random_maps_in_order(silent):
            data = tf.data.Dataset.range(300).map(lambda x: tf.cast(x, tf.double))
            data = data.map(draw, num_parallel_calls=threads)
        found.append([float(x) for x in data])
    assert found[0] == found[1] == found[2]


def test_random_maps_of_keras_layers_yield_the_same() -> None:
    found = []
    for _ in range(3):
        layer = keras.layers.RandomBrightness(0.5, value_range=(0.0, 1.0), seed=5)
        with random_maps_in_order(silent):
            data = tf.data.Dataset.from_tensors(tf.ones((1, 1, 1, 3))).repeat(300)
            data = data.map(partial(layer, training=True), num_parallel_calls=tf.data.AUTOTUNE)
        found.append([float(x[0, 0, 0, 0]) for x in data])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 100


def test_other_maps_stay_parallel() -> None:
    with random_maps_in_order(silent):
        data = tf.data.Dataset.range(3).map(lambda x: x + 1, num_parallel_calls=2)
    assert type(data).__name__ == "_ParallelMapDataset"


def test_workers_take_the_place_of_replicas() -> None:
    with mirrored_by_workers(silent):
        found = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
        assert found is tf.distribute.get_strategy() and found.num_replicas_in_sync == 1
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert type(strategy) is tf.distribute.MirroredStrategy


CPU = tf.config.list_physical_devices("CPU")
PARTS = [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
SETTINGS = {
    "devices": lambda: tf.config.set_visible_devices([], "CPU"),
    "parts of a device": lambda: tf.config.set_logical_device_configuration(CPU[0], PARTS),
    "under an old name": lambda: tf.config.experimental.set_virtual_device_configuration(
        CPU[0], PARTS
    ),
    "steps": lambda: tf.config.threading.set_inter_op_parallelism_threads(77),
    "threads": lambda: tf.config.threading.set_intra_op_parallelism_threads(77),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_come_too_late_are_left_out(setting: Any) -> None:
    tf.constant(1.0)
    told: list[str] = []
    with late_settings_left_out(lambda what, how: told.append(what)):
        setting()
        with pytest.raises(ValueError, match=r"[Uu]nrecognized"):
            tf.config.set_visible_devices(["nothing"], "CPU")
    assert len(told) == 1 and told[0].startswith("set_")
    with pytest.raises(RuntimeError, match="after"):
        setting()


def test_the_command_of_a_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    values = {"script": script, "arguments": ("--epochs", "3"), "adopt": True}
    start = [sys.executable, "-P", "-m", "hvdtrain.worker", "-m", "hvdtrain.adopt"]
    words = [str(script), "--epochs", "3"]
    assert rank_command(program_given(values)) == [*start, *words]
    grown = {"adopt_batch": "per-worker", "adopt_learning_rate": "linear", "adopt_explain": True}
    options = ["--batch", "per-worker", "--learning-rate", "linear", "--explain"]
    assert rank_command(program_given(values | grown)) == [*start, *options, *words]
    with pytest.raises(UsageError, match="--adopt-learning-rate has no effect here: add --adopt"):
        program_given(values | {"adopt": False, "adopt_learning_rate": "sqrt"})


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "package.train"], "package.train is a module"),
        (["bash", "job.sh"], "bash is a program"),
        (["missing.py"], "missing.py"),
        (["--strategy", "tpu", "missing.py"], ""),
    ],
)
def test_what_cannot_be_adopted(command: str, words: list[str], message: str) -> None:
    options = ["-np", "2"] if command != "submit" and "tpu" not in words else []
    done = CliRunner().invoke(main, [command, "--dry-run", *options, "--adopt", *words])
    assert done.exit_code == 2 and "Error" in done.output and message in done.output


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ([], (600, 1800)),
        (["--stall-shutdown-seconds", "90"], (20, 90)),
        (["--stall-shutdown-seconds", "50"], (20, 50)),
        (["--stall-warning-seconds", "20", "--stall-shutdown-seconds", "50"], (20, 50)),
        (["--stall-warning-seconds", "30", "--stall-shutdown-seconds", "60"], (30, 60)),
    ],
)
def test_the_stall_check_is_patient(
    tmp_path: Path, options: list[str], times: tuple[int, int]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    words = ["run", "--dry-run", "-np", "2", *options, "--adopt", str(script)]
    printed = CliRunner().invoke(main, words).output
    for name, seconds in zip(("warning", "shutdown"), times, strict=True):
        assert f"--stall-check-{name}-time-seconds {seconds}" in printed


def test_an_evaluation_reads_as_many_examples_as_keras_does() -> None:
    batches = tf.data.Dataset.range(128).batch(16).repeat()
    found = Evaluation.of(batches, None, 2)
    assert (sum(map(len, found.data)), found.batch, found.is_part) == (32, 16, True)
    assert not Evaluation.of(batches.take(2), None, 2).is_part
    assert Evaluation.of(batches, None, None).data is batches
    arrays = (np.ones(17), np.ones((17, 2)))
    found = Evaluation.of(arrays, 5, 3)
    assert ([part.shape for part in found.data], found.is_part) == ([(15,), (15, 2)], True)
    found = Evaluation.of(arrays, 6, 3)
    assert ([part.shape for part in found.data], found.is_part) == ([(17,), (17, 2)], False)
    with pytest.raises(UsageError, match="another size"):
        Evaluation.of(iter(arrays), 8, 2)


@pytest.mark.parametrize(
    ("data", "given", "steps", "size"),
    [
        (NUMBERS, None, None, 32),
        (NUMBERS, None, 4, 3),  # Keras makes as many batches as there are steps.
        (NUMBERS, 5, 4, 5),
        (DATASET.batch(3), None, 2, 3),
        (DATASET, None, None, 0),
        (Batches(), None, None, 0),
    ],
)
def test_the_batch_of_an_evaluation(
    data: Any, given: int | None, steps: int | None, size: int
) -> None:
    assert Evaluation.of(data, given, steps).batch == size
