"""Times a step of the Trainer with checkpoints against one without, by turns of one training.

Every other epoch has a checkpoint in its middle, and ends when it is written; the others have none. So two epochs that
are compared follow each other within seconds, which a busy machine disturbs alike. Epochs are timed as in `overhead`,
from the beginning of one to the beginning of the next.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from hvdtrain.bench.measurement import Comparison, Launch, report, run_measurement, take_core

PAIRS = 12
"""Number of timed epochs of each kind, after one that is not timed."""


@dataclass(frozen=True)
class CheckpointCost:
    """The result of one pass, from rank 0.

    Attributes:
        steps: Seconds per step without checkpoints and with them; medians, of the second that of the ratio in a pair.
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
    """Yield the cost found in each pass, which is a launch of its own, with a checkpoint after each `every` steps.

    Checkpoints are written to `folder`, which all ranks see, and removed again.

    Raises:
        EngineError: If a measurement failed.
    """
    for _ in range(passes):
        here = Path(tempfile.mkdtemp(prefix="hvdtrain-bench-", dir=folder))
        options = {"name": model, "batch_size": batch_size, "every": every, "folder": str(here)}
        try:
            found = run_measurement(launch, np, Path(__file__), options)
        finally:
            shutil.rmtree(here, ignore_errors=True)
        yield CheckpointCost(**{**found, "steps": Comparison(*found["steps"])})


def time_both(name: str, batch_size: int, every: int, folder: str) -> dict[str, Any] | None:
    """Time both ways on one rank; rank 0 returns the fields of `CheckpointCost`."""
    import keras
    import numpy as np

    import hvdtrain
    from hvdtrain.bench.networks import MODELS, examples, loss
    from hvdtrain.runtime import init
    from hvdtrain.trainer.resume import FitCheckpoints

    waits: list[float] = []
    save = FitCheckpoints.save

    class Clock(keras.callbacks.Callback):
        """Records when epochs begin, and stops the training after the timed ones."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []
            self.writing: Any = None

        def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            self.times.append(time.perf_counter())
            self.model.stop_training = epoch == 1 + 2 * PAIRS

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            if self.writing is not None:
                self.writing.error()  # Waits.
                self.writing = None

    clock = Clock()

    def is_due(self: FitCheckpoints) -> bool:
        epoch, step = divmod(self.steps, every)
        return step == every // 2 and _saves(epoch)

    def timed_save(
        self: FitCheckpoints,
        model: keras.Model,
        logs: Any,
        position: Any,
        last: bool = False,
    ) -> None:
        if position.step or last:  # Otherwise an epoch ends.
            began = time.perf_counter()
            save(self, model, logs, position, last)
            waits.append(time.perf_counter() - began)
            clock.writing = self._writing

    me = init()
    take_core(me.local_rank)
    trainer = hvdtrain.Trainer(
        MODELS[name](),
        keras.optimizers.Adam(),
        loss(),
        global_batch_size=batch_size * me.size,
        jit_compile=False,
        run_dir=Path(folder),
        checkpoints=hvdtrain.Checkpoints(every_steps=every),
    )
    x, y = examples(trainer.model, batch_size * me.size * every, seed=0)
    with (
        mock.patch.object(FitCheckpoints, "is_due", is_due),
        mock.patch.object(FitCheckpoints, "save", timed_save),
    ):
        trainer.fit(x, y, epochs=2 + 2 * PAIRS, verbose=0, callbacks=[clock])
    model = trainer.model
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
        "steps": _steps(clock.times, every),
        # The first one allocates memory, and the last one waits for the disk.
        "wait": statistics.median(waits[1:-1]),
        "copy": copy(),
        "copy_again": statistics.median(copy() for _ in range(5)),
        "bytes": size,
    }


def _saves(epoch: int) -> bool:
    """Whether an epoch, from 1, is the one of its pair that has a checkpoint: the first of every other pair."""
    pair, place = divmod(epoch - 1, 2)
    return place == pair % 2


def _steps(times: Sequence[float], every: int) -> tuple[float, float]:
    """Return the seconds per step without and with checkpoints, from the times at which epochs began."""
    epochs = [end - begin for begin, end in itertools.pairwise(times[1:])]
    pairs = [epochs[number : number + 2] for number in range(0, 2 * PAIRS, 2)]
    # As (without, with) a checkpoint.
    pairs = [pair[::-1] if _saves(1 + 2 * number) else pair for number, pair in enumerate(pairs)]
    without = statistics.median(pair[0] for pair in pairs) / every
    return without, without * statistics.median(pair[1] / pair[0] for pair in pairs)


if __name__ == "__main__":
    report(time_both)
