"""One file for all layouts: each trains and saves, others load what it saved and train on; FOLDER is the test's.

What a layout holds is written as arrays beside the files, for the test to compare with plain Keras.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
from small import RANK, crossentropy, layers, optimizers

from hvdtrain import Trainer
from hvdtrain.collectives.gradient_accumulation import as_one_process
from hvdtrain.collectives.mesh import Mesh
from hvdtrain.errors import UsageError
from hvdtrain.parallel.gather_scatter import gather
from hvdtrain.parallel.layout import Layout
from hvdtrain.parallel.whole_file import DividedState

FOLDER = Path(os.environ["FOLDER"])
BATCH, EXAMPLES, TOKENS = 8, 30, 18
RNG = np.random.default_rng(5)
X = RNG.integers(0, TOKENS, (EXAMPLES, 6)).astype("int32")
Y = RNG.integers(0, 5, EXAMPLES)


class Scale(layers.Layer):
    """A layer of the user's, not registered with Keras."""

    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x: Any) -> Any:
        return self.factor * x


def model() -> keras.Model:
    """The embedding is large enough to wait for its values; one layer is frozen, one has a seed."""
    words = layers.Input((6,), dtype="int32")
    x = layers.Embedding(TOKENS, 64, name="embedding")(words)
    x = layers.Add(name="attended")([x, layers.MultiHeadAttention(2, 8, name="attention")(x, x)])
    x = layers.LayerNormalization(name="norm")(x)
    z = layers.Dense(32, activation="relu", name="up")(x)
    # A mask of ones, but a seed.
    z = layers.Dropout(1e-9, name="dropout")(z)
    x = layers.Add(name="sum")([x, layers.Dense(64, name="down")(z)])
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    x = layers.Dense(16, name="frozen", trainable=False)(x)
    return keras.Model(words, layers.Dense(5, name="out")(Scale(2.0, name="scale")(x)))


SPLIT = {"embedding": "vocabulary", "attention": "heads", "up": "column", "down": "row"}
CHOICES: dict[str, dict[str, Any]] = {
    "ranks": {},
    "tensor": {"layout": Layout(Mesh(tensor=2), split=SPLIT | {"embedding": "column"})},
    "tensor-zero": {"layout": Layout(Mesh(tensor=2), split=SPLIT), "shard_optimizer": True},
    "pipeline": {"layout": Layout(Mesh(pipeline=2), stages=["sum"], micro_batches=2)},
}
ACCUMULATING = ("tensor-zero",)
"""Sources whose optimizer updates at every third step: two gradients wait when they are saved."""


def adam(rate: float, source: str) -> Any:
    return optimizers.Adam(rate, gradient_accumulation_steps=3 if source in ACCUMULATING else None)


def trainer(choice: str, source: str = "", rate: float = 0.5, **options: Any) -> Trainer:
    """By default with a rate that would show if it were not loaded."""
    arguments = {"optimizer": adam(rate, source), "seed": 9} | CHOICES[choice] | options
    loss = crossentropy()
    made = arguments.pop("model", model)
    return Trainer(made, loss=loss, metrics=["accuracy"], global_batch_size=BATCH, **arguments)


def fit(trained: Trainer, **options: Any) -> None:
    trained.fit(X, Y, shuffle=False, verbose=0, **options)


def note(trained: Trainer, name: str) -> None:
    """Write what the ranks hold together: a collective."""
    own = trained.strategy.state
    if isinstance(own, DividedState):
        state = gather(own.pieces(trained.model))
    else:
        held = [*trained.model.variables, *trained.model.optimizer.variables]
        with as_one_process([trained.model.optimizer]):
            state = {v.path: v.numpy() for v in held}
    outputs = trained.predict(X)
    if RANK == 0:
        named = {k.replace("/", "|"): v for k, v in state.items() if "seed_generator" not in k}
        np.savez(FOLDER / f"{name}.npz", outputs=outputs, **named)


def _train_on(choice: str, source: str, before: bool = False) -> None:
    """Load what `source` saved, into a trainer that is new or has trained `before`."""
    trained = trainer(choice, source)
    if before:
        fit(trained)
    trained.load(FOLDER / f"{source}.keras")
    note(trained, f"{source}-in-{choice}")
    fit(trained)
    note(trained, f"{source}-in-{choice}-on")


def case_tensor_to_others() -> None:
    trained = trainer("tensor-zero", "tensor-zero", 0.01, seed=1)
    fit(trained, epochs=2)
    # Twice: the copy that is written leaves nothing behind.
    trained.save(FOLDER / "tensor-zero.keras")
    trained.save(FOLDER / "tensor-zero.keras")
    note(trained, "tensor-zero-saved")
    fit(trained)
    note(trained, "tensor-zero-saved-on")
    _train_on("ranks", "tensor-zero")
    _train_on("pipeline", "tensor-zero")


def case_pipeline_to_others() -> dict[str, Any]:
    """Saved by ModelCheckpoint, on all ranks together; what cannot work is refused."""
    trained = trainer("pipeline", rate=0.01, seed=1)
    own = FOLDER / f"rank{RANK}"
    files = [
        keras.callbacks.ModelCheckpoint(FOLDER / "pipeline.keras"),
        keras.callbacks.ModelCheckpoint(FOLDER / "step{batch}.keras", save_freq=3),
        keras.callbacks.ModelCheckpoint(own / "all.weights.h5", save_weights_only=True),
    ]
    fit(trained, epochs=2, callbacks=files)
    note(trained, "pipeline-saved")
    fit(trained)
    note(trained, "pipeline-saved-on")
    messages = []
    for wrong in (
        lambda: trained.model.save(own / "stage.keras"),
        lambda: fit(trained, callbacks=[keras.callbacks.BackupAndRestore(str(own / "backup"))]),
        lambda: trained.load(FOLDER / "absent.keras"),
        lambda: trained.load(FOLDER / "other.keras"),
    ):
        if RANK == 0 and not (FOLDER / "other.keras").exists():
            keras.Sequential([layers.Input((3,)), layers.Dense(2)]).save(FOLDER / "other.keras")
        try:
            wrong()
        except UsageError as error:
            messages.append(str(error))
    _train_on("tensor", "pipeline", before=True)
    return {"files": sorted(p.name for p in own.glob("*")), "messages": messages}
