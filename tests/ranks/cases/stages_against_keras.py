"""A model in stages on several ranks, and the same in plain Keras with the whole global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
from references import Reference, reference
from small import crossentropy, layers

from hvdtrain import Trainer
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.mesh import Mesh
from hvdtrain.keras_internals.shards import shard_of
from hvdtrain.parallel.layout import Layout

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


def transformer(
    dropout: float = 0.0, penalty: float = 0.0, attention_bias: bool = True
) -> keras.Model:
    """Two blocks; the embedding's output and a second input are used in the last stage, too."""
    l2 = keras.regularizers.L2(penalty) if penalty else None
    words = layers.Input((6,), dtype="int32", name="words")
    facts = layers.Input((3,), name="facts")
    x = first = layers.Embedding(TOKENS, 8, name="embedding")(words)
    for block in range(2):
        attended = layers.MultiHeadAttention(
            2, 4, use_bias=attention_bias, name=f"attention_{block}"
        )(x, x)
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


class Watch(keras.callbacks.Callback):
    """Keeps the loss that each step told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(float(logs["loss"]))


def by_keras(
    make: Callable[[], keras.Model],
    optimizer: Any,
    data: Sequence[Any],
    fit: Any,
    compiled: Any,
    answers: bool = False,
) -> dict[str, Any]:
    """Return what plain Keras makes of the whole batches.

    Weights by path, history, the loss after each step; `answers`: what evaluate and predict return, too.
    """
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(optimizer, **{"loss": crossentropy(), "jit_compile": False} | compiled)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    x, y, weight = (*data, None)[:3]
    watch = Watch()
    options |= fit | {"callbacks": [watch, *fit.get("callbacks", [])]}
    history = model.fit(x, y, sample_weight=weight, **options).history
    found = {
        "steps": watch.steps,
        "weights": {v.path: v.numpy() for v in model.trainable_variables},
        "history": history,
        "whole": model.count_params(),
        "scale": float(getattr(model.optimizer, "dynamic_scale", 0.0)),
    }
    if not answers:
        return found
    evaluated = model.evaluate(x, y, BATCH, sample_weight=weight, verbose=0, return_dict=True)
    predicted = keras.tree.flatten(model.predict(x, batch_size=BATCH, verbose=0))
    return found | {"evaluate": evaluated, "predict": predicted}


def plain(make: Any, optimizer: Any, data: Sequence[Any], *rest: Any, **options: Any) -> Reference:
    """Stand for what `by_keras` returns for the same arguments."""
    return reference(partial(by_keras, make, optimizer, data, *rest, **options), data)


def trainer_of(
    make: Any,
    optimizer: Any,
    *,
    pipeline: int = 2,
    tensor: int = 1,
    split: Any = None,
    stages: Sequence[str] | None = None,
    micro_batches: Any = 4,
    **options: Any,
) -> Trainer:
    mesh = Mesh(pipeline=pipeline, tensor=tensor)
    layout = Layout(mesh, split=split or {}, stages=stages, micro_batches=micro_batches)
    return Trainer(
        make,
        optimizer,
        **{"loss": crossentropy(), "global_batch_size": BATCH, "seed": 1} | options,
        layout=layout,
    )


def weights(trainer: Trainer) -> dict[str, np.ndarray]:
    """The weights of all stages by path, whole; a collective."""
    mine = {
        v.path: (getattr(shard_of(v), "axis", None), v.numpy().tolist())
        for v in trainer.model.trainable_variables
    }
    found: dict[str, np.ndarray] = {}
    # The ranks of the first copy; those of a tensor set follow each other.
    copy = trainer.strategy.position.mesh.size // trainer.strategy.position.mesh.data
    for part in ALL_RANKS.exchange(mine, "weights")[:copy]:
        for path, (axis, value) in part.items():
            if axis is None or path not in found:
                found[path] = np.asarray(value)
            else:
                found[path] = np.concatenate([found[path], value], axis=axis)
    return found


def apart(
    make: Callable[[], keras.Model],
    optimizer: Callable[[], Any],
    data: Sequence[Any],
    fit: Any = None,
    compiled: Callable[[], Any] = dict,
    *,
    weights_only: bool = False,
    watch: bool = False,
    reference: Any = None,
    model: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """How far weights, history, evaluation and predictions are from plain Keras's; `watch`: each step's loss, too.

    `reference` are compile's arguments for plain Keras alone; `model` is for the Trainer what `make` makes.
    """
    fit = {"epochs": EPOCHS, "shuffle": False, "verbose": 0} | (fit or {})
    trainer = trainer_of(model or make, optimizer(), **compiled(), **options)
    watching = Watch()
    history = trainer.fit(*data, **fit, callbacks=[watching] if watch else []).history
    wanted = plain(
        make, optimizer(), data, fit, compiled() | (reference or {}), answers=not weights_only
    )
    result: dict[str, Any] = {
        "histories": history,
        "held": sum(int(np.prod(v.shape)) for v in trainer.model.trainable_variables),
        "whole": wanted.apart(0, "whole"),
        "weights": wanted.apart(weights(trainer), "weights"),
        "history": wanted.apart(history, "history", "ratio"),
    }
    if watch:
        result["steps"] = wanted.apart(watching.steps, "steps", "ratio")
    if weights_only:
        return result
    evaluated = trainer.evaluate(*data, verbose=0, return_dict=True)
    predicted = keras.tree.flatten(trainer.predict(data[0]))
    return result | {
        "evaluated": evaluated,
        "predicted": float(sum(np.abs(p).sum() for p in predicted)),
        "evaluation": wanted.apart(evaluated, "evaluate", "ratio"),
        "predictions": wanted.apart(predicted, "predict"),
    }
