"""Measures the bytes and time to a given accuracy over a slow link, with `Trainer(sync=...)` and lossy compression.

A network trains until its validation accuracy, computed after each epoch, reaches the goal: one with two hidden layers
on scikit-learn's digits, or one that predicts the next character of the Python documentation from the 16 before it, as
in Bengio et al. 2003 (JMLR 3). A step with a learning rate of 0 and an evaluation run first, so that the time does not
include tracing and the first broadcast of the weights. Bytes are those sent by the host's network interfaces except
loopback, including all headers, the epochs' metrics and the comparison of replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.bench.measurement import Launch, report, run_measurement

if TYPE_CHECKING:
    import keras
    import numpy as np

WAYS = ("dense", "bf16", "power-sgd", "top-k", "local-sgd", "diloco", "diloco-int8")
GOALS = {"digits": 0.97, "text": 0.5}
"""Name of a task -> validation accuracy to reach."""
EPOCHS = {"digits": 22, "text": 352}
"""Name of a task -> number of steps in an epoch."""
MOST_EPOCHS = 60
LIMIT_SECONDS = 3600
"""Time that one training may take: the text takes 20 minutes over 10 Mbit/s."""
WINDOW = 16
"""Number of characters that the next one is predicted from."""


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        x: The examples of an epoch.
        y: Their classes.
        unseen: x and y for validation.
        network: Function that builds the model.
        batch: Number of examples per step.
        rate: Learning rate of SGD with momentum 0.9.
    """

    x: np.ndarray
    y: np.ndarray
    unseen: tuple[np.ndarray, np.ndarray]
    network: Callable[[], keras.Model]
    batch: int
    rate: float


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
    task: str, ways: Sequence[str], every: int, goal: float, launch: Launch, ranks: int
) -> Iterator[SlowTraining]:
    """Yield the cost of training to the goal with each method.

    Raises:
        EngineError: If a measurement fails.
    """
    for way in ways:
        options = {"task": task, "way": way, "every": every, "goal": goal}
        found = run_measurement(launch, ranks, Path(__file__), options, limit=LIMIT_SECONDS)
        yield SlowTraining(way, **found)


def digits() -> Task:
    """Return scikit-learn's digits, 64 pixels each, and a network of 301,066 parameters."""
    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = (pixels[order] / 16.0).astype("float32"), labels[order]
    batch = 64
    seen = EPOCHS["digits"] * batch

    def network() -> keras.Model:
        hidden = [keras.layers.Dense(512, "relu") for _ in range(2)]
        return keras.Sequential([keras.layers.Input([64]), *hidden, keras.layers.Dense(10)])

    return Task(x[:seen], y[:seen], (x[seen:], y[seen:]), network, batch, rate=0.05)


def text() -> Task:
    """Return windows of the documentation that Python contains, and a network for the next character."""
    from pydoc_data.topics import topics

    import keras
    import numpy as np

    written = "\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(written))
    codes = np.searchsorted(letters, list(written)).astype("int32")
    windows = np.lib.stride_tricks.sliding_window_view(codes, WINDOW + 1)
    unseen = windows[-20_000::10]
    batch = 128
    # Without the windows that share characters with the unseen ones.
    seen = np.random.default_rng(0).choice(
        windows[: -20_000 - WINDOW], EPOCHS["text"] * batch, False
    )

    def network() -> keras.Model:
        return keras.Sequential(
            [
                keras.layers.Input([WINDOW], dtype="int32"),
                keras.layers.CategoryEncoding(len(letters), "one_hot"),
                keras.layers.Dense(32, use_bias=False),
                keras.layers.Flatten(),
                keras.layers.Dense(512, "relu"),
                keras.layers.Dense(len(letters)),
            ]
        )

    x, y = seen[:, :-1], seen[:, -1]
    return Task(x, y, (unseen[:, :-1], unseen[:, -1]), network, batch, rate=0.1)


def train(task: str, way: str, every: int, goal: float) -> dict[str, Any] | None:
    """Train with one method; return the fields of SlowTraining except `way` on rank 0, None on others."""
    import keras

    import hvdtrain
    from hvdtrain.keras import Compression, DistributedOptimizer

    given = {"digits": digits, "text": text}[task]()
    compression = {
        "bf16": Compression.bf16,
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

    trainer = hvdtrain.Trainer(
        given.network,
        optimizer if sync else DistributedOptimizer(optimizer, compression=compression),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ["accuracy"],
        global_batch_size=given.batch,
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

    fit: dict[str, Any] = {"validation_data": given.unseen, "verbose": 0}
    trainer.fit(given.x[: given.batch], given.y[: given.batch], **fit)
    trainer.model.optimizer.learning_rate = given.rate
    trainer.fit(given.x, given.y, epochs=MOST_EPOCHS, callbacks=[Goal()], **fit)
    found = {
        "steps": len(seen) * len(given.x) // given.batch,
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
    report(train)
