"""Measures the bytes and time to a given accuracy over a slow link, with `Trainer(sync=...)` and lossy compression.

A network with two hidden layers trains on scikit-learn's digits until its validation accuracy, computed after each
epoch, reaches the goal. A step with a learning rate of 0 and an evaluation run first, so that the time does not include
tracing and the first broadcast of the weights. Bytes are those sent by the host's network interfaces except loopback,
including all headers, the epochs' metrics and the comparison of replicas.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench.measurement import Launch, report, run_measurement

WAYS = ("dense", "power-sgd", "top-k", "local-sgd", "diloco", "diloco-int8")
WIDTH, BATCH, MOST_EPOCHS = 512, 64, 60
TRAINED = 22 * BATCH
"""Number of training images; the rest of the 1797 are for validation."""


@dataclass(frozen=True)
class SlowTraining:
    """Cost of training to the goal with one method.

    Attributes:
        way: Method, one of WAYS.
        steps: Number of steps trained.
        seconds: Time of training, including the evaluations.
        bytes: Number of bytes that the first host sent.
        accuracy: Final validation accuracy; below the goal if MOST_EPOCHS did not reach it.
    """

    way: str
    steps: int
    seconds: float
    bytes: int
    accuracy: float


def measure_slow_link(
    ways: Sequence[str], every: int, goal: float, launch: Launch, ranks: int
) -> Iterator[SlowTraining]:
    """Yield the cost of training to the goal with each method.

    Args:
        ways: Methods, of WAYS.
        every: Number of steps in a round.
        goal: Validation accuracy to reach.
        launch: How to start the ranks, on several hosts; see measurement.Launch.
        ranks: Number of ranks over all hosts.

    Raises:
        EngineError: If a measurement fails.
    """
    for way in ways:
        options = {"way": way, "every": every, "goal": goal}
        yield SlowTraining(way, **run_measurement(launch, ranks, Path(__file__), options))


def train_digits(way: str, every: int, goal: float) -> dict[str, Any] | None:
    """Train with one method; return the fields of SlowTraining except `way` on rank 0, None on others."""
    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    import hvdtrain
    from hvdtrain.keras import Compression, DistributedOptimizer

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = (pixels[order] / 16.0).astype("float32"), labels[order]
    unseen = (x[TRAINED:], y[TRAINED:])
    compression = {
        "power-sgd": Compression.power_sgd(rank=4),
        "top-k": Compression.top_k(fraction=0.01),
    }.get(way, Compression.none)
    syncs: dict[str, hvdtrain.LocalSGD | hvdtrain.DiLoCo] = {
        "local-sgd": hvdtrain.LocalSGD(every),
        "diloco": hvdtrain.DiLoCo(every, outer_momentum=0.5),
        "diloco-int8": hvdtrain.DiLoCo(every, outer_momentum=0.5, exchange="int8"),
    }
    sync = syncs.get(way)
    optimizer = keras.optimizers.SGD(0.0, momentum=0.9)

    def network() -> keras.Model:  # All methods begin with the same weights.
        hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(2)]
        return keras.Sequential([keras.layers.Input([64]), *hidden, keras.layers.Dense(10)])

    trainer = hvdtrain.Trainer(
        network,
        optimizer if sync else DistributedOptimizer(optimizer, compression=compression),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ["accuracy"],
        global_batch_size=BATCH,
        sync=sync,
    )
    seen: list[float] = []

    begin: list[tuple[float, int]] = []

    class Goal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            begin.append((time.perf_counter(), _sent()))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(logs["val_accuracy"])
            self.model.stop_training = seen[-1] >= goal

    fit: dict[str, Any] = {"validation_data": unseen, "verbose": 0}
    trainer.fit(x[:BATCH], y[:BATCH], **fit)
    trainer.model.optimizer.learning_rate = 0.05
    trainer.fit(x[:TRAINED], y[:TRAINED], epochs=MOST_EPOCHS, callbacks=[Goal()], **fit)
    found = {
        "steps": len(seen) * TRAINED // BATCH,
        "seconds": time.perf_counter() - begin[0][0],
        "bytes": _sent() - begin[0][1],
        "accuracy": seen[-1],
    }
    return found if trainer.rank.is_first else None


def _sent() -> int:
    """Return the number of bytes that this host has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    cards = (line.split(":") for line in lines)
    return sum(int(counts.split()[8]) for name, counts in cards if name.strip() != "lo")


if __name__ == "__main__":
    report(train_digits)
