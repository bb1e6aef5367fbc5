"""What rank 0 cannot write: every rank raises the same error, and none waits."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import keras
from trainer_failures import RANK, X, Y, fit, message, model, trainer

import hvdtrain
import hvdtrain.keras as hvd

CALLBACKS = keras.callbacks


def folder() -> Path:
    """A new one, the same on every rank: in it a file, where some would make a folder."""
    made = Path(hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None))
    (made / "file").touch()
    return made


def case_saving() -> list[str]:
    """Under a file, over a folder, on a full disk; a whole model and one in parts. Then all is well."""
    said = []
    for options in ({}, {"shard_optimizer": True}):
        trained, place = trainer(**options), folder()
        fit(trained, epochs=1)
        (place / "in_the_way.keras" / "folder").mkdir(parents=True, exist_ok=True)
        (place / "good.keras").touch()
        if RANK == 0:
            (place / ".tmp.full.keras").symlink_to("/dev/full")
        for name in ("file/model.keras", "in_the_way.keras", "full.keras"):
            said.append(message(partial(trained.save, place / name)))
        trained.save(place / "good.keras")
        trained.load(place / "good.keras")
        hvd.allreduce(0.0, name="all have read")
        said.append(f"left: {sorted(path.name for path in place.iterdir())}")
    return said


def case_run_dir() -> list[str]:
    """The folder goes away in the second of three epochs; another one has a folder where the model should be."""
    gone, blocked = folder() / "run", folder()
    (blocked / "model.keras" / "folder").mkdir(parents=True, exist_ok=True)

    def remove(epoch: int, logs: Any) -> None:
        if epoch == 1:
            shutil.rmtree(gone, ignore_errors=True)

    removing = CALLBACKS.LambdaCallback(on_epoch_end=remove)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = message(lambda: fit(trainer(run_dir=gone), epochs=3, callbacks=[removing]))
    warned = [str(w.message) for w in caught if "metrics.csv" in str(w.message)]
    hvd.allreduce(0.0, name="all have trained")
    lines = (gone / "metrics.csv").read_text().splitlines()[1:]
    return [
        said,
        hvd.broadcast_object("\n".join(warned)),
        " ".join(line.partition(",")[0] for line in lines),
        str((gone / "model.keras").is_file()),
        message(lambda: fit(trainer(run_dir=blocked), epochs=1)),
    ]


def case_full_disk() -> dict[str, Any]:
    """A log on a disk that is full from the first epoch on, on two ranks and in a training of one."""
    found = {}
    for name, log in (("full", "/dev/full"), ("fine", str(folder() / "log.csv"))):
        trained = trainer(seed=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(trained, callbacks=[CALLBACKS.CSVLogger(log)])
        found[name] = trained.model.history.history["loss"]
        found[f"{name} warned"] = [str(w.message) for w in caught if "CSVLogger" in str(w.message)]
    return found


def writers(place: Path) -> list[keras.callbacks.Callback]:
    return [
        CALLBACKS.ModelCheckpoint(place / "file" / "model.keras"),
        CALLBACKS.CSVLogger(place / "missing" / "log.csv"),
        CALLBACKS.BackupAndRestore(place / "file" / "backup"),
        CALLBACKS.TensorBoard(place / "file" / "logs"),
    ]


def case_error_of_a_kind_not_foreseen() -> str:
    """In the thread that writes a checkpoint, on rank 0 only."""
    run = folder() / "run"
    checkpoints = hvdtrain.Checkpoints(every_steps=1)
    with mock.patch("hvdtrain.trainer.resume.save", side_effect=MemoryError("no room")):
        try:
            fit(trainer(run_dir=run, checkpoints=checkpoints))
        except (MemoryError, hvdtrain.EngineError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def case_callbacks() -> list[str]:
    """Of the Trainer, of a Trainer whose optimizer is in parts, and of model.fit with a distributed optimizer."""
    said = []
    place = folder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for writer in writers(place):
            said.append(message(partial(fit, trainer(), callbacks=[writer])))
        checkpoint = writers(place)[0]
        in_parts = trainer(shard_optimizer=True)
        said.append(message(partial(fit, in_parts, callbacks=[checkpoint])))
        for writer in writers(place):
            drop_in = model()
            drop_in.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
            fitting = partial(drop_in.fit, X, Y, verbose=0, epochs=2, callbacks=[writer])
            said.append(message(fitting))
    return said
