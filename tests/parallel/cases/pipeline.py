"""Stages on several ranks against plain Keras in one process with the whole global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from small import SIZE, crossentropy, difference, layers, optimizers

from hvdtrain import Trainer
from hvdtrain.agreement import exchange
from hvdtrain.parallel.layout import Layout
from hvdtrain.parallel.mesh import Mesh

BATCH = 16
EXAMPLES = 5 * BATCH + 1
"""The last of 6 batches has a single example: all copies of the model but one are idle."""
EPOCHS = 5
TOKENS = 12
RNG = np.random.default_rng(3)
WORDS = RNG.integers(1, TOKENS, (EXAMPLES, 6))
FACTS = RNG.normal(size=(EXAMPLES, 3)).astype("float32")
Y = RNG.integers(0, 5, EXAMPLES)
WEIGHT = RNG.uniform(0.2, 2, EXAMPLES).astype("float32")
X = {"words": WORDS, "facts": FACTS}


def transformer(dropout: float = 0.0, penalty: float = 0.0) -> keras.Model:
    """Two blocks; the embedding's output and a second input are used in the last stage, too."""
    l2 = keras.regularizers.L2(penalty) if penalty else None
    words = layers.Input((6,), dtype="int32", name="words")
    facts = layers.Input((3,), name="facts")
    x = first = layers.Embedding(TOKENS, 8, name="embedding")(words)
    for block in range(2):
        attended = layers.MultiHeadAttention(2, 4, name=f"attention_{block}")(x, x)
        x = layers.LayerNormalization(name=f"norm_{block}")(
            layers.Add(name=f"skip_{block}")([x, attended])
        )
        z = layers.Dense(12, activation="relu", kernel_regularizer=l2, name=f"up_{block}")(x)
        z = layers.Dropout(dropout, name=f"dropout_{block}")(
            layers.Dense(8, name=f"down_{block}")(z)
        )
        x = layers.Add(name=f"sum_{block}")([x, z])
    pooled = layers.GlobalAveragePooling1D(name="pool")(layers.Concatenate(name="wide")([x, first]))
    joined = layers.Concatenate(name="join")([pooled, layers.Dense(4, name="facts_up")(facts)])
    return keras.Model({"words": words, "facts": facts}, layers.Dense(5, name="out")(joined))


def plain(
    make: Callable[[], keras.Model], optimizer: Any, data: Sequence[Any], fit: Any, compiled: Any
) -> tuple[keras.Model, dict[str, list[float]]]:
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(optimizer, **{"loss": crossentropy(), "jit_compile": False} | compiled)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    return model, model.fit(*data, **options | fit).history


def split(
    make: Callable[[], keras.Model],
    optimizer: Any,
    data: Sequence[Any],
    fit: Any,
    compiled: Any,
    *,
    pipeline: int = 2,
    stages: Sequence[str] | None = None,
    micro_batches: int = 4,
    **trainer: Any,
) -> tuple[Trainer, dict[str, list[float]]]:
    ready = Trainer(
        make,
        optimizer,
        **{"loss": crossentropy()} | compiled,
        global_batch_size=BATCH,
        seed=1,
        layout=Layout(Mesh(pipeline=pipeline), stages=stages, micro_batches=micro_batches),
        **trainer,
    )
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    return ready, ready.fit(*data, **options | fit).history


def weights(trainer: Trainer) -> dict[str, Any]:
    """All stages' weights by path; a collective."""
    mine = {v.path: v.numpy().tolist() for v in trainer.model.trainable_variables}
    return {path: value for part in exchange(mine, "weights") for path, value in part.items()}


def apart(
    make: Callable[[], keras.Model],
    optimizer: Callable[[], Any],
    data: Sequence[Any],
    fit: Any = None,
    compiled: Callable[[], Any] = dict,
    **options: Any,
) -> dict[str, Any]:
    """How far weights, history, evaluation and predictions are from plain Keras's."""
    model, wanted = plain(make, optimizer(), data, fit or {}, compiled())
    trainer, history = split(make, optimizer(), data, fit or {}, compiled(), **options)
    assert set(history) == set(wanted), (history, wanted)
    found = weights(trainer)
    assert len(found) == len(model.trainable_variables)
    evaluated = trainer.evaluate(*data)
    expected = model.evaluate(*data, batch_size=BATCH, verbose=0, return_dict=True)
    return {
        "weights": max(difference([found[v.path]], [v.numpy()]) for v in model.trainable_variables),
        "history": max(relative(history[name], wanted[name]) for name in wanted),
        "evaluation": max(relative(evaluated[name], expected[name]) for name in expected),
        "predictions": difference(
            keras.tree.flatten(trainer.predict(data[0])),
            keras.tree.flatten(model.predict(data[0], batch_size=BATCH, verbose=0)),
        ),
        "histories": history,
        "held": len(trainer.model.trainable_variables),
    }


def relative(a: Any, b: Any) -> float:
    a, b = np.asarray(a, float), np.asarray(b, float)
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-3)))


def case_sgd() -> dict[str, Any]:
    return apart(
        transformer,
        lambda: optimizers.SGD(0.05, momentum=0.9),
        (X, Y),
        {"validation_data": (X, Y)},
        lambda: {"metrics": ["accuracy"]},
        stages=["attention_1"],
    )
