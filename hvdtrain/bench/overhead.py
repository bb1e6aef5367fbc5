"""Times a step of the Trainer against a step of Keras's own `fit`, in turn, in the same processes.

On one rank the reference is plain Keras, on several ranks Keras's `fit` with hvdtrain.keras.DistributedOptimizer; or
`fit` of an ordinary script, as `hvdtrain run --adopt` has it. Both train the same network on the same examples, each
rank on one core. Epochs are timed from the beginning of one to the beginning of the next, so that reading data, logs
and the work between epochs count.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.bench.measurement import Comparison, Launch, report, run_measurement, take_core

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

    from hvdtrain.runtime import Rank

    Arrays = tuple[np.ndarray, np.ndarray]

DATA = ("arrays", "dataset")
SECONDS = 1.0
"""Target duration of one epoch."""
EPOCHS = 2
"""Number of timed epochs per pass, after one that is not timed."""
SHUFFLED = 1024
"""Number of examples in a Dataset's shuffle buffer."""


def measure_overhead(
    model: str, data: str, batch_size: int, np: int, passes: int, launch: Launch, adopt: bool
) -> list[Comparison]:
    """Return the milliseconds per step of `fit` and of the Trainer on rank 0, for each pass.

    Raises:
        EngineError: If the measurement failed.
    """
    options = {"name": model, "kind": data, "batch_size": batch_size, "passes": passes}
    options["adopt"] = adopt
    found = run_measurement(launch, np, Path(__file__), options)
    return [Comparison(*one) for one in found["milliseconds"]]


def time_both(
    name: str, kind: str, batch_size: int, passes: int, adopt: bool
) -> dict[str, Any] | None:
    """Time both ways in turn on one rank; rank 0 returns its milliseconds per step for each pass."""
    import numpy as np

    from hvdtrain.collectives.communicator import ALL_RANKS
    from hvdtrain.runtime import init

    me = init()
    take_core(me.local_rank)
    fit = (adopted_fit if adopt else keras_fit)(me, name, kind, batch_size)
    train = trainer_fit(me, name, kind, batch_size)
    train(10)
    mine = round(SECONDS / fit(10))
    steps = int(ALL_RANKS.broadcast(np.clip(mine, 5, 300), 0, "hvdtrain_bench_steps"))
    found = [[1e3 * fit(steps), 1e3 * train(steps)] for _ in range(passes)]
    return {"milliseconds": found} if me.is_first else None


def keras_fit(me: Rank, name: str, kind: str, batch_size: int) -> Callable[[int], float]:
    """Return a function that trains on this rank's own examples by Keras's `fit`, and returns the seconds per step."""
    import keras

    from hvdtrain.bench.networks import MODELS, loss
    from hvdtrain.keras import DistributedOptimizer, broadcast_variables

    model = MODELS[name]()
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if me.size > 1:
        optimizer = DistributedOptimizer(optimizer)
        broadcast_variables(model.variables)
    model.compile(optimizer, loss(), jit_compile=False)

    return lambda steps: _seconds(model.fit, model, kind, batch_size, steps, seed=me.rank)


def adopted_fit(me: Rank, name: str, kind: str, batch_size: int) -> Callable[[int], float]:
    """Return a function that trains by Keras's `fit` under --adopt, and returns the seconds per step."""
    import keras

    from hvdtrain.adopt.fits import adopted_fits
    from hvdtrain.adopt.growth import Growth
    from hvdtrain.adopt.notes import Notes
    from hvdtrain.adopt.private_folder import private_folder
    from hvdtrain.adopt.same_way import SameWay
    from hvdtrain.adopt_options import AdoptOptions
    from hvdtrain.bench.networks import MODELS, loss

    model = MODELS[name]()
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss(), jit_compile=False)
    notes = Notes(me, "")

    def seconds(steps: int) -> float:
        with (
            tempfile.TemporaryDirectory() as empty,
            contextlib.chdir(empty),
            private_folder(me) as folder,
            adopted_fits(me, notes, folder, SameWay(notes), Growth(AdoptOptions())),
        ):
            return _seconds(model.fit, model, kind, batch_size * me.size, steps)

    return seconds


def trainer_fit(me: Rank, name: str, kind: str, batch_size: int) -> Callable[[int], float]:
    """Return a function that trains by the Trainer, which divides the data, and returns the seconds per step."""
    import keras

    import hvdtrain
    from hvdtrain.bench.networks import MODELS, loss

    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    global_batch_size = batch_size * me.size
    trainer = hvdtrain.Trainer(
        MODELS[name](), optimizer, loss(), global_batch_size=global_batch_size, jit_compile=False
    )

    return lambda steps: _seconds(trainer.fit, trainer.model, kind, global_batch_size, steps)


def dataset(data: Arrays, batch_size: int) -> tf.data.Dataset:
    """Return the shuffled batches of `data` as a tutorial would make them."""
    import tensorflow as tf

    examples = tf.data.Dataset.from_tensor_slices(data)
    return examples.shuffle(SHUFFLED, seed=1).batch(batch_size).prefetch(tf.data.AUTOTUNE)


def _seconds(
    fit: Callable[..., Any], model: Any, kind: str, batch_size: int, steps: int, seed: int = 0
) -> float:
    """Train `model` by `fit` on random examples; return the seconds per step."""
    from hvdtrain.bench.networks import examples

    x, y = examples(model, batch_size * steps, seed)
    given: dict[str, Any] = (
        {"x": dataset((x, y), batch_size)} if kind == "dataset" else {"x": x, "y": y}
    )
    if kind == "arrays" and fit == model.fit:  # A Trainer knows the size of its batches.
        given["batch_size"] = batch_size
    return seconds_of_step(fit, given, steps)


def seconds_of_step(fit: Callable[..., Any], data: dict[str, Any], steps: int) -> float:
    """Train 1 + EPOCHS epochs of `steps` steps; return the seconds per step, without the first epoch."""
    import keras

    times: list[float] = []
    # Not a callback for steps, which would slow the Trainer down.
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: times.append(time.perf_counter()),
        on_train_end=lambda logs: times.append(time.perf_counter()),
    )
    fit(**data, epochs=1 + EPOCHS, verbose=0, callbacks=[clock])
    return (times[-1] - times[1]) / (EPOCHS * steps)


if __name__ == "__main__":
    report(time_both)
