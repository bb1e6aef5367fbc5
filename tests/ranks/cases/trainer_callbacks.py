"""Keras's own callbacks under the Trainer, its files and its learning rates; FOLDER is the test's folder."""

from __future__ import annotations

import contextlib
import io
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
from references import Reference, reference
from small import RANK, SIZE, difference, layers, optimizers, weights

import hvdtrain
from hvdtrain.trainer import stragglers

BATCH = 6
EXAMPLES = 5 * BATCH + 2
STEPS = 6
FOLDER = Path(os.environ["FOLDER"])

_rng = np.random.default_rng(0)
X = _rng.normal(size=(EXAMPLES, 3)).astype("float32")
Y = _rng.normal(size=(EXAMPLES, 1)).astype("float32")
VALID = [X[:11], -Y[:11]]
"""Validation loss rises where training goes well."""


def model() -> keras.Model:
    return keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dense(1)])


def trainer(optimizer: Any = None, **kwargs: Any) -> hvdtrain.Trainer:
    optimizer = optimizer or optimizers.SGD(0.05)
    return hvdtrain.Trainer(
        model, optimizer, **{"loss": "mse", "global_batch_size": BATCH, "seed": 1} | kwargs
    )


def fit(trained: hvdtrain.Trainer, callbacks: Any = (), **kwargs: Any) -> dict[str, list[float]]:
    arguments = {"epochs": 8, "shuffle": False, "verbose": 0, "validation_data": VALID} | kwargs
    return trained.fit(X, Y, callbacks=callbacks, **arguments).history


def plain(callback: Any, epochs: int = 8) -> Reference:
    """Plain Keras's training with a callback: weights, epochs, rates, and what a Record noted."""

    def compute() -> dict[str, Any]:
        keras.utils.set_random_seed(1)
        built = model()
        built.compile(optimizers.SGD(0.05), "mse", jit_compile=False)
        arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "validation_data": VALID}
        history = built.fit(X, Y, epochs=epochs, callbacks=[callback], **arguments).history
        return {
            "weights": weights(built),
            "epochs": len(history["loss"]),
            "rates": history.get("learning_rate", []),
            "losses": getattr(callback, "losses", []),
        }

    return reference(compute)


def case_early_stopping() -> dict[str, Any]:
    def stopping() -> Any:
        return keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)

    trained = trainer()
    history = fit(trained, [stopping()])
    wanted, epochs = plain(stopping()), len(history["loss"])
    return {
        "epochs": epochs,
        "epochs apart": wanted.apart(epochs, "epochs"),
        "weights": wanted.apart(weights(trained.model), "weights"),
    }


def case_reduce_on_plateau() -> dict[str, Any]:
    def plateau() -> Any:
        return keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_lr=1e-4)

    trained = trainer()
    history = fit(trained, [plateau()])
    wanted = plain(plateau())
    return {
        "rates": history["learning_rate"],
        "rates apart": wanted.apart(history["learning_rate"], "rates", "ratio"),
        "weights": wanted.apart(weights(trained.model), "weights"),
    }


def case_writers() -> dict[str, Any]:
    """The files go to folders by rank: a writer that ran on rank 1 would leave some there."""
    folder = FOLDER / f"rank{RANK}"
    callbacks = [
        keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True),
        keras.callbacks.ModelCheckpoint(
            folder / "step.weights.h5", save_weights_only=True, save_freq=4
        ),
        keras.callbacks.TensorBoard(folder / "board", update_freq=2),
        keras.callbacks.CSVLogger(folder / "log.csv"),
    ]
    folder.mkdir()
    trained = trainer()
    history = fit(trained, callbacks, epochs=3)
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return {
        "files": [n for n in names if "events" not in n],
        "boards": len(names),
        "history": history,
    }


def case_stop_on_one_rank() -> dict[str, Any]:
    """How many steps each rank took when only the last asked to stop."""

    def stop(at: int) -> Any:
        def stop_training(number: int, logs: Any) -> None:
            if RANK == SIZE - 1 and number == at:
                trained.model.stop_training = True

        return stop_training

    found = {}
    trained = trainer()
    fit(trained, [keras.callbacks.LambdaCallback(on_train_batch_end=stop(3))])
    found["batch"] = int(trained.model.optimizer.iterations)
    trained = trainer()
    fit(trained, [keras.callbacks.LambdaCallback(on_epoch_end=stop(1))])
    found["epoch"] = int(trained.model.optimizer.iterations)
    trained = trainer()
    fit(trained, [keras.callbacks.LambdaCallback(on_train_batch_begin=stop(2))])
    found["begin"] = int(trained.model.optimizer.iterations)
    return found


def case_terminate_on_nan() -> int:
    """A nan among the last rank's examples of the third step."""
    trained = trainer()
    x = X.copy()
    x[3 * BATCH - 1] = np.nan
    trained.fit(
        x, Y, epochs=2, shuffle=False, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
    )
    return int(trained.model.optimizer.iterations)


class Record(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.states: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))
        self.states.append(float(self.model.metrics[0].result()))
        self.rates.append(float(self.model.optimizer.learning_rate))


def case_batch_logs() -> dict[str, Any]:
    """What a callback sees after every step, and what it sees in plain Keras."""
    ours = Record()
    fit(trainer(), [ours], epochs=2)
    wanted = plain(Record(), epochs=2)
    return {
        "losses": ours.losses,
        "apart": wanted.apart(ours.losses, "losses", "ratio"),
        "states apart": wanted.apart(ours.states, "losses", "ratio"),
    }


class Evaluate(keras.callbacks.Callback):
    """Evaluates by the model itself, which begins to count anew: in some steps, and before an epoch."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self._here = RANK in ranks
        self.losses: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2 and self._here:
            self.model.evaluate(X[:7], -Y[:7], verbose=0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations in (3, 6, 10) and self._here:
            self.model.evaluate(X[:7], -Y[:7], verbose=0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])


def case_evaluate_in_a_step() -> dict[str, Any]:
    """The losses of epochs, some of them in part of what was evaluated, by all ranks and by the first alone."""
    found = {}
    for ranks in ((0, 1), (0,)):
        ours = Evaluate(ranks)
        fit(trainer(), [ours], epochs=4)
        wanted = plain(Evaluate((RANK,)), epochs=4)
        found[str(ranks)] = wanted.apart(ours.losses, "losses", "ratio")
    return found


def case_backup_and_restore() -> dict[str, Any]:
    return _broken_off(accumulating=False)


def case_backup_while_gradients_wait() -> dict[str, Any]:
    return _broken_off(accumulating=True)


def _broken_off(accumulating: bool) -> dict[str, Any]:
    """A run that breaks off in epoch 3, and a new one that goes on."""

    def break_off(epoch: int, logs: Any) -> None:
        if epoch == 2:
            raise InterruptedError

    def adam() -> Any:
        # Of 6 steps an epoch, 12 when it breaks off, 2 wait for the update: on each rank its own.
        return optimizers.Adam(1e-2, gradient_accumulation_steps=5 if accumulating else None)

    backup = FOLDER / f"backup-{accumulating}"
    broken = trainer(adam())
    with contextlib.suppress(InterruptedError):
        breaking = keras.callbacks.LambdaCallback(on_epoch_begin=break_off)
        fit(broken, [keras.callbacks.BackupAndRestore(backup), breaking], epochs=5)
    resumed = trainer(adam())
    history = fit(resumed, [keras.callbacks.BackupAndRestore(backup)], epochs=5)
    whole = trainer(adam())
    fit(whole, epochs=5)
    return {
        "epochs": len(history["loss"]),
        "weights": difference(weights(resumed.model), weights(whole.model)),
        "epochs of the next fit": len(fit(resumed, epochs=2)["loss"]),
    }


class Halving(optimizers.SGD):
    """Changes the gradients before they are accumulated, so that the ranks' are summed before."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply([gradient / 2 for gradient in grads], trainable_variables)


def case_saved_while_own_gradients_wait() -> dict[str, Any]:
    """Of 6 steps 2 wait for the update: the file of one process holds the same, and training goes on from it."""

    def halving() -> Any:
        return Halving(0.05, gradient_accumulation_steps=4)

    def compute() -> dict[str, Any]:
        keras.utils.set_random_seed(1)
        built = model()
        built.compile(halving(), "mse", jit_compile=False)
        arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        built.fit(X, Y, **arguments)
        waiting = [v.numpy() for v in built.optimizer._accumulated_gradients]
        built.fit(X, Y, **arguments)
        return {"waiting": waiting, "weights": weights(built)}

    wanted = reference(compute)
    path = FOLDER / "waiting.keras"
    first = trainer(halving())
    fit(first, epochs=1, validation_data=None)
    first.save(path)
    loaded = keras.saving.load_model(path, custom_objects={"Halving": Halving})
    waiting = [v.numpy() for v in loaded.optimizer._accumulated_gradients]
    second = trainer(halving())
    second.load(path)
    fit(second, epochs=1, validation_data=None)
    return {
        "waiting": wanted.apart(waiting, "waiting"),
        "weights": wanted.apart(weights(second.model), "weights"),
    }


class Tracked:
    """A tracker that keeps the steps at which it started and got an epoch."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def start(self, run: Any) -> None:
        self.steps.append(0)

    def log(self, values: Any, step: int) -> None:
        self.steps += [step] * ("epoch" in values)

    def end(self, status: str) -> None: ...


def case_run_dir() -> dict[str, Any]:
    run_dir = FOLDER / "runs" / "one"
    tracked = Tracked()
    trained = trainer(run_dir=run_dir, trackers=tracked)
    found = {"history": fit(trained, epochs=3), "tracked": tracked.steps, "again": ""}
    try:
        fit(trainer(run_dir=run_dir))
    except hvdtrain.UsageError as error:
        found["again"] = str(error)
    return found


class Slow(keras.callbacks.Callback):
    """Works for a while at the end of each epoch, on one rank."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if hvdtrain.init().rank == 1:
            time.sleep(0.6)


def case_straggler() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, callbacks in (("slow", [Slow()]), ("alike", [])):
        run_dir = FOLDER / "runs" / name
        with (
            warnings.catch_warnings(record=True) as caught,
            mock.patch.object(stragglers, "LEAST_SECONDS", 2.0),
        ):
            warnings.simplefilter("always")
            fit(trainer(run_dir=run_dir), callbacks, epochs=5)
        found[name] = [str(w.message) for w in caught if "slows the others down" in str(w.message)]
    return found


def case_learning_rate() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for scaling in ("none", "linear", "sqrt"):
        trained = trainer(learning_rate_scaling=scaling)
        found[scaling] = float(trained.model.optimizer.learning_rate)
    for scaling in ("none", "linear"):
        record = Record()
        trained = trainer(learning_rate_scaling=scaling, warmup_epochs=0.5)
        fit(trained, [record], epochs=1)
        found[f"warm-up {scaling}"] = record.rates
    decay = optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    for name, kwargs in (
        ("scale", {"learning_rate_scaling": "linear"}),
        ("warm", {"warmup_epochs": 1}),
    ):
        try:
            trainer(optimizers.SGD(decay), **kwargs)
        except hvdtrain.UsageError as error:
            found[name] = str(error)
    trained = trainer(optimizers.SGD(decay))
    fit(trained, epochs=1)
    found["schedule"] = float(trained.model.optimizer.learning_rate)
    return found


def case_progress() -> list[str]:
    shown = []
    for verbose in (0, 1, 2):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            fit(trainer(), epochs=1, verbose=verbose)
        shown.append(output.getvalue())
    return shown
