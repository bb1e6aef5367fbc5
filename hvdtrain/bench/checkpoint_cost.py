"""What checkpoints cost: a step of the Trainer with them against one without, in turn, in the same processes.

Epochs are four times as long as a checkpoint is apart, so that one falls due in each so many steps: three within the
epoch, and the one at its end. They are timed as in `overhead`, from the beginning of one to the beginning of the next.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench.measurement import Comparison, Launch, report, run_measurement, take_core

CHECKPOINTS = 4
"""In an epoch."""


@dataclass(frozen=True)
class CheckpointCost:
    """What a measurement found, on rank 0.

    Attributes:
        steps: seconds of a step without checkpoints and with them, for each pass.
        copies: seconds that copying the weights and the optimizer's state takes, for each pass.
        bytes: of weights and optimizer's state.
    """

    steps: list[Comparison]
    copies: list[float]
    bytes: int


def measure_checkpoint_cost(
    model: str, batch_size: int, every: int, np: int, passes: int, folder: Path, launch: Launch
) -> CheckpointCost:
    """Measure on `np` ranks, in one launch. Raises EngineError.

    Args:
        model: name of a network in bench.networks.
        batch_size: examples per rank.
        every: steps between two checkpoints.
        np: ranks.
        passes: how many.
        folder: in which they are written, and removed again; all ranks see it.
        launch: see measurement.Launch.
    """
    folder = Path(tempfile.mkdtemp(prefix="hvdtrain-bench-", dir=folder))
    try:
        options = {"name": model, "batch_size": batch_size, "every": every, "passes": passes}
        found = run_measurement(launch, np, Path(__file__), {**options, "folder": str(folder)})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return CheckpointCost(
        [Comparison(*one) for one in found["seconds"]], found["copies"], found["bytes"]
    )


def time_both(
    name: str, batch_size: int, every: int, passes: int, folder: str
) -> dict[str, Any] | None:
    """Time both ways in turn on one rank; rank 0 returns its seconds for each pass."""
    import keras

    import hvdtrain
    from hvdtrain.bench.networks import MODELS, loss
    from hvdtrain.bench.overhead import examples, seconds_of_step
    from hvdtrain.runtime import init

    me = init()
    take_core(me.local_rank)
    batch, steps = batch_size * me.size, CHECKPOINTS * every

    def train(run: str, checkpoints: hvdtrain.Checkpoints | None) -> tuple[float, keras.Model]:
        keras.backend.clear_session()
        trainer = hvdtrain.Trainer(
            MODELS[name](),
            keras.optimizers.Adam(),
            loss(),
            global_batch_size=batch,
            jit_compile=False,
            run_dir=Path(folder, run),
            checkpoints=checkpoints,
        )
        x, y = examples(trainer.model, batch * steps, seed=0)
        return seconds_of_step(trainer.fit, {"x": x, "y": y}, steps), trainer.model

    found, copies, size = [], [], 0
    for number in range(passes):
        without, _ = train(f"{number}-without", None)
        saving, model = train(f"{number}-with", hvdtrain.Checkpoints(every_steps=every))
        found.append([without, saving])
        state = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
        size = sum(array.nbytes for array in state)
        began = time.perf_counter()
        copied = [array.copy() for array in state]
        copies.append(time.perf_counter() - began)
        del copied
    return {"seconds": found, "copies": copies, "bytes": size} if me.is_first else None


if __name__ == "__main__":
    report(time_both)
