"""Times a step of the Trainer with checkpoints against one without, in turn, in the same processes.

An epoch is twice as long as the interval between checkpoints: one is taken within the epoch, and one at its end. Epochs
are timed as in `overhead`, from the beginning of one to the beginning of the next. The end of the last one, which waits
for the disk, is not timed: it occurs once per training.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from hvdtrain.bench.measurement import Comparison, Launch, report, run_measurement, take_core

CHECKPOINTS = 2
"""Number of checkpoints per epoch."""
EPOCHS = 4
"""Number of timed epochs, after one that is not timed; the training stops after the first step of the next."""


@dataclass(frozen=True)
class CheckpointCost:
    """The result of one pass, from rank 0.

    Attributes:
        steps: Seconds per step without checkpoints and with them.
        wait: Median of the seconds that training waits for a checkpoint.
        copy: Seconds to copy weights and optimizer state into new memory.
        copy_again: Seconds to copy them into memory that was written before.
        bytes: Bytes of weights and optimizer state.
    """

    steps: Comparison
    wait: float
    copy: float
    copy_again: float
    bytes: int


def measure_checkpoint_cost(
    model: str, batch_size: int, every: int, np: int, passes: int, folder: Path, launch: Launch
) -> Iterator[CheckpointCost]:
    """Yield the cost found in each pass, which is a launch of its own.

    Args:
        model: Name of a network in bench.networks.
        batch_size: Number of examples per rank.
        every: Number of steps between two checkpoints.
        np: Number of ranks.
        passes: Number of passes.
        folder: Folder that all ranks see, in which checkpoints are written and removed again.
        launch: See `measurement.Launch`.

    Raises:
        EngineError: If a measurement failed.
    """
    for number in range(passes):
        here = Path(tempfile.mkdtemp(prefix="hvdtrain-bench-", dir=folder))
        options = {"name": model, "batch_size": batch_size, "every": every, "folder": str(here)}
        try:
            # Alternate: the first training in a process may be slower, or faster.
            found = run_measurement(
                launch, np, Path(__file__), {**options, "saves_first": number % 2 == 1}
            )
        finally:
            shutil.rmtree(here, ignore_errors=True)
        yield CheckpointCost(**{**found, "steps": Comparison(*found["steps"])})


def time_both(
    name: str, batch_size: int, every: int, folder: str, saves_first: bool
) -> dict[str, Any] | None:
    """Time both ways on one rank; rank 0 returns the fields of `CheckpointCost`.

    Args:
        name: Name of a network in bench.networks.
        batch_size: Number of examples per rank.
        every: Number of steps between two checkpoints.
        folder: Folder for the checkpoints.
        saves_first: Whether the first training is the one with checkpoints.
    """
    import keras
    import numpy as np

    import hvdtrain
    from hvdtrain.bench.networks import MODELS, examples, loss
    from hvdtrain.runtime import init
    from hvdtrain.trainer.resume import FitCheckpoints

    class Clock(keras.callbacks.Callback):
        """Records when epochs begin, and stops the training after the timed ones."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            self.times.append(time.perf_counter())
            self.model.stop_training = epoch == 1 + EPOCHS

    me = init()
    take_core(me.local_rank)
    steps = CHECKPOINTS * every

    def train(checkpoints: hvdtrain.Checkpoints | None) -> tuple[float, keras.Model]:
        keras.backend.clear_session()
        trainer = hvdtrain.Trainer(
            MODELS[name](),
            keras.optimizers.Adam(),
            loss(),
            global_batch_size=batch_size * me.size,
            jit_compile=False,
            run_dir=Path(folder, "without" if checkpoints is None else "with"),
            checkpoints=checkpoints,
        )
        x, y = examples(trainer.model, batch_size * me.size * steps, seed=0)
        clock = Clock()
        trainer.fit(x, y, epochs=2 + EPOCHS, verbose=0, callbacks=[clock])
        return (clock.times[-1] - clock.times[1]) / (EPOCHS * steps), trainer.model

    waits: list[float] = []
    save = FitCheckpoints.save

    def timed_save(self: FitCheckpoints, *args: Any, **kwargs: Any) -> None:
        before, began = self._writing, time.perf_counter()
        save(self, *args, **kwargs)
        if (
            self._writing is not before
        ):  # Otherwise it was skipped, as the previous one is still being written.
            waits.append(time.perf_counter() - began)

    seconds: dict[bool, float] = {}
    with mock.patch.object(FitCheckpoints, "save", timed_save):
        for saves in (saves_first, not saves_first):
            schedule = hvdtrain.Checkpoints(every_steps=every) if saves else None
            seconds[saves], model = train(schedule)
    if not me.is_first:
        return None
    state = [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]
    size = sum(array.nbytes for array in state)
    copies = [np.empty_like(array) for array in state]

    def copy() -> float:
        began = time.perf_counter()
        for array, to in zip(state, copies, strict=True):
            np.copyto(to, array)
        return time.perf_counter() - began

    return {
        "steps": [seconds[False], seconds[True]],
        # The first one allocates memory, and the last one waits for the disk.
        "wait": statistics.median(waits[1:-1]),
        "copy": copy(),
        "copy_again": statistics.median(copy() for _ in range(5)),
        "bytes": size,
    }


if __name__ == "__main__":
    report(time_both)
