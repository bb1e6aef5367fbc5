"""Fits that are ended at some step and run again, against the undisturbed one."""

from __future__ import annotations

import csv
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain import Checkpoints
from hvdtrain.checkpoint.folder import Disk, newest
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.first_rank import on_first
from hvdtrain.data import from_files
from hvdtrain.worker import preemption_notice

EPOCHS, EXAMPLES, BATCH = 6, 52, 8
STEPS = -(-EXAMPLES // BATCH)


class Ended(Exception):
    """Stands for the end of the process."""


class EndAt(keras.callbacks.Callback):
    """Ends the fit after a step, counted in this process."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise Ended

    def get_state(self) -> None:
        return None

    def set_state(self, state: None) -> None:
        pass


class TellToEnd(keras.callbacks.Callback):
    """Sends the last rank a signal after a step, or after a batch of a validation, counted in this process."""

    def __init__(self, number: signal.Signals, steps: int, validation: bool = False) -> None:
        super().__init__()
        self.number, self.left, self.validation = number, steps, validation

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count(not self.validation)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count(self.validation)

    def count(self, counts: bool) -> None:
        self.left -= counts
        if self.left == 0 and ALL_RANKS.rank() == ALL_RANKS.size() - 1:
            os.kill(os.getpid(), self.number)

    def get_state(self) -> None:
        return None

    def set_state(self, state: None) -> None:
        pass


class Count(keras.callbacks.Callback):
    """Says itself what it remembers, and counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = {"batches": 0}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen["batches"] += 1

    def get_state(self) -> dict[str, int]:
        return dict(self.seen)

    def set_state(self, state: dict[str, int]) -> None:
        self.seen = dict(state)


def folder() -> Path:
    """A new folder, the same on all ranks."""
    return Path(on_first(tempfile.mkdtemp, "folder"))


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 6)).astype(np.float32)
    return x, rng.integers(0, 3, EXAMPLES)


def arrays(run_dir: Path) -> tuple[Any, Any]:
    x, y = data()
    return (x, y), (x[:20], y[:20])


def files(run_dir: Path) -> tuple[Any, Any]:
    """A file for each example, named by its number."""
    x, y = data()
    folder = run_dir.parent / f"{run_dir.name}-files"

    def write() -> None:
        folder.mkdir(exist_ok=True)
        for number, (row, label) in enumerate(zip(x, y, strict=True)):
            (folder / f"{number:03}").write_bytes(row.tobytes() + label.tobytes())

    on_first(write, "files")

    def read(name: Any) -> Any:
        content = tf.io.read_file(name)
        row = tf.io.decode_raw(tf.strings.substr(content, 0, 24), tf.float32)
        label = tf.io.decode_raw(tf.strings.substr(content, 24, 8), tf.int64)
        return tf.ensure_shape(row, [6]), tf.ensure_shape(label, [1])[0]

    return from_files(f"{folder}/*", read), from_files(f"{folder}/00*", read)


class Items(keras.utils.PyDataset):
    """Shuffles itself after each epoch."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(workers=2)
        self.x, self.y = data()
        self.ends = np.cumsum([0, *lengths])
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> Any:
        rows = slice(self.ends[index], self.ends[index + 1])
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        order = self.rng.permutation(len(self.x))
        self.x, self.y = self.x[order], self.y[order]


def items(run_dir: Path) -> tuple[Any, Any]:
    """The validation data shuffles itself, too, and is not read to its end."""
    return Items([4] * 13), Items([4] * 5)


def dataset(run_dir: Path) -> tuple[Any, Any]:
    """Shuffles anew for each epoch, evaluations as well, which see but a part of it."""
    made = tf.data.Dataset.from_tensor_slices(data()).shuffle(20, seed=2)
    other = tf.data.Dataset.from_tensor_slices(data()).shuffle(52).batch(BATCH)
    return made.map(lambda x, y: (2 * x, y)).batch(BATCH), other.take(3)


def generator(run_dir: Path) -> tuple[Any, Any]:
    """Another order for each pass."""
    x, y = data()
    rng = np.random.default_rng(4)

    def batches() -> Iterator[Any]:
        order = rng.permutation(EXAMPLES)
        for begin in range(0, EXAMPLES, BATCH):
            rows = order[begin : begin + BATCH]
            yield x[rows], y[rows]

    return batches, (x[:20], y[:20])


def noisy(run_dir: Path) -> tuple[Any, Any]:
    """Adds numbers from NumPy's generator, which the thread that reads ahead draws."""
    x, y = data()

    def batches() -> Iterator[Any]:
        for begin in range(0, EXAMPLES, BATCH):
            rows = slice(begin, begin + BATCH)
            yield x[rows] + np.random.normal(size=x[rows].shape).astype(np.float32), y[rows]

    return batches, (x[:20], y[:20])


def changed(run_dir: Path) -> tuple[Any, Any]:
    batches, validation = generator(run_dir)
    return lambda: reversed(list(batches())), validation


def divided(run_dir: Path) -> tuple[Any, Any]:
    """Each rank's own part; the last rank's ends first."""
    x, y = data()
    begin, end = ALL_RANKS.rank() * 28, min(EXAMPLES, ALL_RANKS.rank() * 28 + 28)
    own = tf.data.Dataset.from_tensor_slices((x[begin:end], y[begin:end]))
    return own.shuffle(20, seed=3).batch(2), (x[:20], y[:20])


SOURCES: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "arrays": arrays,
    "files": files,
    "PyDataset": items,
    "tf.data": dataset,
    "generator": generator,
    "noisy generator": noisy,
    "changed generator": changed,
    "live generator": lambda run_dir: (generator(run_dir)[0](), None),
    "sharded": divided,
}


def optimizers(rate: Any) -> dict[str, Any]:
    adam = keras.optimizers.Adam
    return {
        "adam": adam(rate),
        "accumulation": adam(rate, gradient_accumulation_steps=3),
        "averages": adam(rate, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=None),
        "loss scaling": keras.optimizers.LossScaleOptimizer(adam(rate), dynamic_growth_steps=5),
        "power": hvd.DistributedOptimizer(
            adam(rate), compression=hvd.Compression.power_sgd(rank=1)
        ),
        "largest": hvd.DistributedOptimizer(adam(rate), compression=hvd.Compression.top_k(0.1)),
        "momentum": keras.optimizers.SGD(rate, momentum=0.9),
    }


def model(units: int = 7) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def train(
    run_dir: Path,
    optimizer: str = "adam",
    every: int | None = 1,
    end_at: int = 0,
    epochs: int = EPOCHS,
    units: int = 7,
    resume: Any = "auto",
    told: tuple[Any, ...] | None = None,
    source: str = "arrays",
    steps: int | None = None,
    network: Callable[[int], keras.Model] = model,
    best_weights: bool = True,
    rate: Any = 0.02,
    plateau: bool = True,
    **options: Any,
) -> dict[str, Any] | None:
    """Return what a fit leaves; None if it was ended."""
    trainer = hvdtrain.Trainer(
        network(units),
        optimizers(rate)[optimizer],
        "sparse_categorical_crossentropy",
        ["accuracy"],
        global_batch_size=BATCH,
        run_dir=run_dir,
        checkpoints=Checkpoints(every) if every else None,
        resume=resume,
        **options,
    )
    stop = keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=best_weights)
    reduce = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.05, factor=0.5)
    count = Count()
    callbacks: list[Any] = [stop, count, *([reduce] if plateau else [])]
    callbacks += [keras.callbacks.CSVLogger(run_dir / "log.csv")]
    callbacks += [EndAt(end_at)] if end_at else []
    callbacks += [TellToEnd(*told)] if told else []
    train_data, validation = SOURCES[source](run_dir)
    try:
        history = trainer.fit(
            train_data,
            validation_data=validation,
            epochs=epochs,
            callbacks=callbacks,
            verbose=0,
            steps_per_epoch=steps,
            sharded=source == "sharded",
        )
    except Ended:
        return None
    variables = [*trainer.model.variables, *trainer.model.optimizer.variables]
    return {
        "variables": [v.numpy() for v in variables],
        "history": {**history.history, "epoch": history.epoch},
        "stopping": [stop.wait, stop.best, stop.best_epoch],
        "plateau": [reduce.wait, reduce.best] if plateau else [],
        "batches": count.seen["batches"],
        "log": (run_dir / "log.csv").read_text(),
        "metrics": metrics(run_dir),
    }


def metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    times = ("seconds", "examples_per_second")
    return [{k: v for k, v in row.items() if k not in times} for row in rows]


def differences(found: Any, expected: Any) -> list[str]:
    """Which of what fits left differs, at all."""
    bad = [key for key in expected if key != "variables" and found[key] != expected[key]]
    pairs = zip(found["variables"], expected["variables"], strict=True)
    far = [float(np.max(np.abs(a - b), initial=0)) for a, b in pairs if a.dtype.kind in "fiu"]
    return bad + [f"variable {n}: {value}" for n, value in enumerate(far) if value]


def ended_and_resumed(optimizer: str, every: int, ends: Sequence[int], **options: Any) -> list[str]:
    undisturbed = train(folder(), optimizer, None, **options)
    run_dir = folder()
    for end_at in ends:
        assert train(run_dir, optimizer, every, end_at, **options) is None
    return differences(train(run_dir, optimizer, every, **options), undisturbed)


class Summing(keras.Model):
    """A probe before the first step shows how the ranks' losses add up."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *rest: Any, **options: Any) -> Any:
        return tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(y, y_pred, True)) / 50


def summing(units: int) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inputs = keras.Input((6,))
    return Summing(inputs, layers.Dense(3)(layers.Dense(units, activation="tanh")(inputs)))


class Noise(keras.layers.Layer):
    """Draws from Keras's global generator, of which the model does not know."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x + keras.random.normal(tf.shape(x)) if training else x


def drawing(units: int) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential([keras.Input((6,)), layers.Dense(units), Noise(), layers.Dense(3)])


def case_exact() -> dict[str, list[str]]:
    """Ends: at the first step, within an epoch, at the last step of one, at the first of another; the last step."""
    return {
        "twice within epochs": ended_and_resumed("adam", 3, [5, STEPS + 4]),
        "last and first step": ended_and_resumed("adam", 1, [STEPS, 2, 1, STEPS]),
        "numbers of Keras": ended_and_resumed("momentum", 3, [STEPS + 2], network=drawing),
        "a loss that is a sum": ended_and_resumed("momentum", 3, [5], network=summing),
    }


def case_exact_elsewhere() -> dict[str, list[str]]:
    """Ends: before a checkpoint, and where only the ends of epochs are saved."""
    return {
        "before the first checkpoint": ended_and_resumed("adam", 5, [2, 3, 9]),
        "epochs alone": ended_and_resumed("adam", 1000, [STEPS + 2, STEPS + 1]),
    }


def case_data() -> dict[str, list[str]]:
    """Data that has no number for each example, ended within the second epoch."""
    options: dict[str, Any] = {"source": "generator", "steps": 5, "epochs": 3}
    return {
        "sharded": ended_and_resumed("adam", 3, [STEPS + 5], source="sharded", epochs=3),
        "generator, 5 steps": ended_and_resumed("adam", 3, [9], **options),
        "noisy": ended_and_resumed("adam", 3, [5], source="noisy generator", epochs=2),
    }


def case_data_has_changed() -> dict[str, str]:
    """The messages for data that does not come again."""
    run_dir = folder()
    train(run_dir, every=2, end_at=4, source="generator")
    return {
        "other order": refusal(run_dir, source="changed generator"),
        "live": refusal(folder(), source="live generator"),
    }


def case_steps_per_execution() -> list[str]:
    return ended_and_resumed("momentum", 2, [3], steps_per_execution=2, warmup_epochs=2)


def slow_rename(self: Disk, path: Path, to: Path) -> None:
    time.sleep(0.2)
    path.replace(to)


def case_preempted() -> dict[str, Any]:
    """One rank is told to end, in a step or in a validation: all save at one step, soon, and go on there."""
    undisturbed = train(folder(), every=None)
    run_dir, messages = folder(), []
    before = signal.getsignal(signal.SIGTERM)
    mock.patch.object(Disk, "rename", slow_rename).start()
    for told in ((signal.SIGTERM, 1, True), (signal.SIGTERM, 2), (signal.SIGUSR1, 1)):
        heard = signal.getsignal(signal.SIGUSR1)
        preemption_notice.listen(ALL_RANKS.rank())
        try:
            train(run_dir, every=1000, told=told)
        except hvdtrain.Preempted as error:
            written = [one.name for one in (run_dir / "checkpoints").iterdir()]
            saved = newest(run_dir / "checkpoints")
            assert saved is not None
            trained = saved.facts["position"]["trained"] is not None
            messages.append([str(error), error.exit_code, written, trained])
        finally:
            signal.signal(signal.SIGUSR1, heard)
    found = train(run_dir, every=1000)
    return {
        "messages": messages,
        "differences": differences(found, undisturbed),
        "restored": signal.getsignal(signal.SIGTERM) == before,
    }


def case_more_epochs() -> dict[str, Any]:
    """A finished run trains nothing; with more epochs it goes on as one that had them from the beginning."""
    undisturbed = train(folder(), every=None)
    run_dir = folder()
    short = train(run_dir, epochs=2)
    again = train(run_dir, epochs=2)
    assert train(run_dir, end_at=3) is None
    train(run_dir, epochs=2)  # The checkpoint is one of the third epoch.
    saved = keras.models.load_model(run_dir / "model.keras")
    hvd.allreduce(0.0, name="all have read")
    return {
        "again": differences(again, short),
        "steps of the saved model": int(saved.optimizer.iterations),
        "longer": differences(train(run_dir), undisturbed),
        "finished": differences(train(run_dir), undisturbed),
    }


def case_refused() -> dict[str, str]:
    """The messages for what cannot go on."""
    run_dir = folder()
    train(run_dir, epochs=1)
    calls: dict[str, dict[str, Any]] = {
        "model": {"units": 8},
        "optimizer": {"optimizer": "momentum"},
        "state": {"optimizer": "averages"},
        "seed": {"seed": 5},
        "never": {"resume": "never"},
    }
    found = {name: refusal(run_dir, **options) for name, options in calls.items()}
    found["must"] = refusal(folder(), resume="must")
    return found


def refusal(run_dir: Path, **options: Any) -> str:
    try:
        train(run_dir, **options)
    except hvdtrain.UsageError as error:
        return str(error)
    return "not refused"
