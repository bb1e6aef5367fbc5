"""`hvdtrain run --adopt`: what a rank does to a script's files, batches and seeds, as far as one process shows it."""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from hvdtrain.adopt.batches import Replayable, batch_examples
from hvdtrain.adopt.evaluations import Evaluation
from hvdtrain.adopt.file_copies import FileCopies
from hvdtrain.adopt.keras_order import ScriptsSeed, in_keras_order
from hvdtrain.adopt.private_folder import MOST_ENTRIES, PrivateFolder, mirror, private_folder
from hvdtrain.adopt.random_maps import random_maps_in_order
from hvdtrain.adopt.same_seeds import same_seeds
from hvdtrain.cli.command_table import main
from hvdtrain.errors import UsageError
from hvdtrain.launch.rank_program import program_given, rank_command
from hvdtrain.runtime import Rank, init

SECOND = Rank(1, 2, 1, 2)


def silent(what: str, how: str) -> None: ...


NUMBERS = np.arange(10.0)[:, None]


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "user's"
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "deep" / "table.csv").write_text("a,b\n")
    (folder / "log.txt").write_text("first\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(params=["copies", "links"])
def private(
    users: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PrivateFolder]:
    if request.param == "links":
        monkeypatch.setattr("hvdtrain.adopt.file_copies.LARGEST", -1)
    init()
    with private_folder(SECOND) as folder:
        yield folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names_and_contents() -> tuple[list[Path], dict[str, bytes]]:
    return sorted(Path().rglob("*")), contents(Path())


def test_a_rank_reads_the_users_files(users: Path, private: PrivateFolder) -> None:
    assert Path.cwd() != users
    assert contents(Path.cwd()) == contents(users)
    assert Path("data/deep/table.csv").read_text() == "a,b\n"


def test_a_rank_lists_files_in_the_users_order(
    users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another file system; /dev/shm lists the newest file first."""
    for number in np.random.default_rng(0).permutation(99):
        (users / str(number)).touch()
    if os.access("/dev/shm", os.W_OK):
        monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    wanted = os.listdir()  # noqa: PTH208
    init()
    with private_folder(SECOND):
        assert os.listdir() == wanted  # noqa: PTH208


def opened(mode: str) -> None:
    with Path("log.txt").open(mode) as file:
        file.write("more")


def os_opened(flags: int) -> None:
    with os.fdopen(os.open("log.txt", flags), "wb") as file:
        file.write(b"x")


WRITES = {
    "write": lambda: Path("log.txt").write_text("mine"),
    "append": lambda: opened("a"),
    "update": lambda: opened("r+"),
    "os.open": lambda: os_opened(os.O_WRONLY),
    "os.open, emptied": lambda: os_opened(os.O_WRONLY | os.O_TRUNC),
    "np.save": lambda: np.savez("log.txt", NUMBERS),
    "remove": lambda: Path("log.txt").unlink(),
    "replace": lambda: Path("new").write_text("x") and Path("new").replace("log.txt"),
    "h5py": lambda: h5py.File("log.txt", "w").close(),
    "gfile": lambda: (
        tf.io.write_file("other", "x") and tf.io.gfile.GFile("log.txt", "w").write("y")
    ),
    "TFRecord": lambda: tf.io.TFRecordWriter("log.txt").close(),
    "mkdir": lambda: Path("out").mkdir(),
    "in a folder": lambda: Path("data/deep/new.csv").write_text("x"),
    "through a parent": lambda: Path("data/../log.txt").write_text("mine"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_a_rank_writes_is_its_own(users: Path, private: PrivateFolder, write: Any) -> None:
    before, names = contents(users), sorted(users.rglob("*"))
    own = names_and_contents()
    write()
    assert contents(users) == before and sorted(users.rglob("*")) == names
    assert names_and_contents() != own


def test_a_file_that_is_appended_to_keeps_its_lines(users: Path, private: PrivateFolder) -> None:
    with Path("log.txt").open("a") as file:
        file.write("second\n")
    assert Path("log.txt").read_text() == "first\nsecond\n"


def test_a_file_that_exists_is_not_created(users: Path, private: PrivateFolder) -> None:
    with pytest.raises(FileExistsError):
        opened("x")
    assert Path("log.txt").read_text() == "first\n"


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "model.weights.h5"])
def test_a_model_that_is_saved_again(users: Path, private: PrivateFolder, name: str) -> None:
    """hvdtrain writes it beside the file that a link points to."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    save = model.save_weights if "weights" in name else model.save
    (users / name).write_text("of an earlier run")
    private.refresh()
    save(name)
    assert (users / name).read_text() == "of an earlier run"
    assert Path(name).stat().st_size > 1000 and not Path(name).is_symlink()
    assert not [*users.glob(".tmp*")]


def test_a_checkpoint_that_is_written_again(users: Path, private: PrivateFolder) -> None:
    for value, folder in ((1.0, users), (2.0, Path())):
        tf.train.Checkpoint(v=tf.Variable(value)).write(str(folder / "ckpt"))
        tf.saved_model.save(tf.Module(), str(folder / "exported"))
        private.refresh()
    for value, folder in ((1.0, users), (2.0, Path())):
        found = tf.train.load_checkpoint(str(folder / "ckpt"))
        assert found.get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE") == value
    assert not [path for path in Path("exported").rglob("*.pb") if path.is_symlink()]


def test_a_file_of_a_linked_h5_is_read_through_the_link(
    users: Path, private: PrivateFolder
) -> None:
    large = np.arange(2e5)
    with h5py.File(users / "a.h5", "w") as file:
        file["x"] = large
    private.refresh()
    with h5py.File("a.h5") as file:
        assert np.array_equal(file["x"], large)
    assert Path("a.h5").is_symlink()


def test_refresh_shows_what_rank_0_wrote_and_keeps_what_this_rank_wrote(
    users: Path, private: PrivateFolder
) -> None:
    Path("log.txt").write_text("mine")
    Path("best").write_text("a file here")
    (users / "checkpoints").mkdir()
    (users / "checkpoints" / "best.keras").write_text("model")
    (users / "best").mkdir()
    (users / "best" / "x").write_text("a folder there")
    private.refresh()
    assert Path("checkpoints/best.keras").read_text() == "model"
    assert (Path("log.txt").read_text(), Path("best").read_text()) == ("mine", "a file here")


def test_a_private_folder_ends_with_its_block(users: Path) -> None:
    with private_folder(SECOND):
        own = Path.cwd()
        Path("x").write_text("x")
    assert not own.exists() and Path.cwd() == users
    assert set(contents(users)) == {"log.txt", "data/deep/table.csv"}


def test_the_folder_of_a_rank_that_was_killed_is_removed(
    users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    init()
    (tmp_path / "hvdtrain-adopt-killed" / "data").mkdir(parents=True)
    with private_folder(SECOND):
        first = Path.cwd().parent.parent
        os.chdir(users)
        with private_folder(Rank(2, 3, 2, 3)):
            second = Path.cwd().parent.parent
            assert {*tmp_path.glob("*hvdtrain-adopt-*")} == {first, second}
    assert not [*tmp_path.glob("*hvdtrain-adopt-*")]


def test_the_first_rank_works_in_the_users_folder(users: Path) -> None:
    with private_folder(Rank(0, 2, 0, 2)) as folder:
        Path("log.txt").write_text("mine")
        folder.own_file("log.txt", truncated=True)
    assert (users / "log.txt").read_text() == "mine"


def test_a_folder_with_too_many_files_is_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_ENTRIES == 20_000
    monkeypatch.setattr("hvdtrain.adopt.private_folder.MOST_ENTRIES", 5)
    users, own = tmp_path / "user", tmp_path / "own"
    for name in ("images/1", "images/2", "images/3", "out/1", "log"):
        (users / name).parent.mkdir(parents=True, exist_ok=True)
        (users / name).touch()
    for _ in range(2):
        mirror(users, own, FileCopies(users))
        assert (own / "images").is_symlink() and not (own / "out").is_symlink()
        assert contents(own).keys() == {"log", "out/1"}
        assert (own / "images" / "1").is_file()
        (users / "images" / "4").touch()


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
    ],
)
def test_unknown_batches(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batch_examples(data, None, None)


def test_what_was_read_before_the_training_comes_again() -> None:
    begun: list[bool] = []
    numbers = Replayable(iter(range(6)), lambda: bool(begun))
    assert list(itertools.islice(numbers, 3)) == [0, 1, 2]
    assert list(itertools.islice(numbers.again(), 4)) == [0, 1, 2, 3]
    trained = Replayable(iter(range(6)), lambda: bool(begun))
    next(trained)
    begun.append(True)
    assert list(itertools.islice(trained, 2)) == [1, 2]
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
    x, y, weights = in_keras_order((NUMBERS, -NUMBERS, NUMBERS[:, 0] * 2), 4, shuffle, None)
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


def test_the_order_of_the_items_of_a_py_dataset_is_kerass() -> None:
    model = Seen()
    model.compile("sgd", "mse")
    random.seed(3)
    model.fit(Pairs(), epochs=3, verbose=0)
    random.seed(3)
    shuffled = in_keras_order((Pairs(), None, None), 2, True, None)
    found = []
    for _ in range(3):
        shuffled.on_epoch_begin()
        found += [x for index in range(shuffled.num_batches) for x in shuffled[index][0].ravel()]
        shuffled.on_epoch_end()
    assert model.seen == found != list(NUMBERS.ravel()) * 3


def test_items_whose_order_is_left_to_the_trainer() -> None:
    """A shorter one at the end, and epochs that are not one pass."""
    assert in_keras_order((Pairs(NUMBERS[:9]), None, None), 2, True, None) is None
    assert in_keras_order((Pairs(), None, None), 2, True, 3) is None


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


def test_other_maps_stay_parallel() -> None:
    with random_maps_in_order(silent):
        data = tf.data.Dataset.range(3).map(lambda x: x + 1, num_parallel_calls=2)
    assert type(data).__name__ == "_ParallelMapDataset"


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
