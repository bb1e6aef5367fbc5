"""Training to the same quality over a slow link: bytes and time with `Trainer(sync=...)` and lossy compression.

A network with two hidden layers learns scikit-learn's digits until its accuracy on images that it has not seen reaches
the goal, asked after each epoch. Tracing and the first broadcast of the weights are over when the clock begins: one
step with a learning rate of 0 and one evaluation come first. Bytes are those of the host's network cards, the loopback
apart, with all headers, the epochs' metrics and the replicas' comparison.
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
"""Images, of 1797; the others are for validation."""


@dataclass(frozen=True)
class SlowTraining:
    """What one way took to reach the goal.

    Attributes:
        way: of WAYS.
        steps: trained.
        seconds: of training, with the evaluations.
        bytes: that the first host sent.
        accuracy: in the end; below the goal where it was not reached in MOST_EPOCHS.
    """

    way: str
    steps: int
    seconds: float
    bytes: int
    accuracy: float


def measure_slow_link(
    ways: Sequence[str], every: int, goal: float, launch: Launch, ranks: int
) -> Iterator[SlowTraining]:
    """Yield what each of `ways` took.

    Args:
        ways: of WAYS.
        every: steps in a round.
        goal: accuracy on the validation images.
        launch: see measurement.Launch; on several hosts.
        ranks: on all hosts.

    Raises:
        EngineError: a measurement failed.
    """
    for way in ways:
        options = {"way": way, "every": every, "goal": goal}
        yield SlowTraining(way, **run_measurement(launch, ranks, Path(__file__), options))


def train_digits(way: str, every: int, goal: float) -> dict[str, Any] | None:
    """Train; rank 0 returns the fields of SlowTraining without the way."""
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

    def network() -> keras.Model:  # Made here, all ways begin with the same weights.
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
    """Bytes that this host has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    cards = (line.split(":") for line in lines)
    return sum(int(counts.split()[8]) for name, counts in cards if name.strip() != "lo")


if __name__ == "__main__":
    report(train_digits)
