"""How far the Trainer on any number of ranks is from plain Keras in one process: the models, the data, the measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from references import Reference, reference
from results import far
from small import crossentropy, layers, optimizers, weights

import hvdtrain

BATCH = 16
EXAMPLES = 5 * BATCH + 1
"""The last of 6 batches has a single example: every rank but one is idle."""
EPOCHS = 5
TOKENS = 20

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(EXAMPLES, 8, 8, 1)).astype("float32")
WORDS = RNG.integers(1, TOKENS, (EXAMPLES, 6))
PADDED = np.where(RNG.random(WORDS.shape) < 0.4, 0, WORDS)
PADDED[:, 0] = 1
Y = RNG.integers(0, 5, EXAMPLES)
SOME_IGNORED = np.where(np.arange(EXAMPLES) % BATCH < np.arange(EXAMPLES) // BATCH * 3, -1, Y)
"""Labels, of which -1 does not count: from batch to batch more of the first rank's, in the end all of them."""
WEIGHT = RNG.uniform(0.2, 2, EXAMPLES).astype("float32")
VALID = (IMAGES[:37], WORDS[:37])

SGD = optimizers.SGD


def momentum() -> Any:
    return SGD(0.05, momentum=0.9)


def inputs(words: np.ndarray = WORDS) -> dict[str, np.ndarray]:
    return {"image": IMAGES, "words": words}


def mixed_model(
    mask: bool = False, penalties: bool = False, normalization: Callable[[], Any] | None = None
) -> keras.Model:
    """Convolution, embedding and dense layers."""
    l2 = keras.regularizers.L2(1e-2) if penalties else None
    image = layers.Input((8, 8, 1), name="image")
    words = layers.Input((6,), dtype="int32", name="words")
    conv = layers.Conv2D(4, 3, activation="relu", activity_regularizer=l2)(image)
    word = layers.Embedding(TOKENS, 4, mask_zero=mask)(words)
    if normalization is not None:
        conv = normalization()(conv)
    z = layers.Concatenate()([layers.Flatten()(conv), layers.GlobalAveragePooling1D()(word)])
    z = layers.Dense(8, activation="tanh", kernel_regularizer=l2)(z)
    return keras.Model({"image": image, "words": words}, layers.Dense(5)(z))


def tagging_model() -> keras.Model:
    """An output for each word: the padding's mask reaches the loss."""
    words = layers.Input((6,), dtype="int32")
    return keras.Model(words, layers.Dense(5)(layers.Embedding(TOKENS, 4, mask_zero=True)(words)))


def one_process(
    make: Callable[[], keras.Model],
    optimizer: Any,
    data: tuple,
    fit: dict[str, Any],
    compiled: dict[str, Any],
) -> tuple[keras.Model, Any]:
    """Train with plain Keras here and now; `plain` does it once for all ranks and numbers of ranks."""
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(optimizer, **{"loss": crossentropy(), "jit_compile": False} | compiled)
    x, y, *weight = data
    history = model.fit(
        x,
        y,
        sample_weight=weight[0] if weight else None,
        **{"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0} | fit,
    )
    return model, history.history


def plain(
    make: Callable[[], keras.Model],
    optimizer: Any,
    data: tuple,
    fit: dict[str, Any] | None = None,
    compiled: dict[str, Any] | None = None,
    answers: bool = False,
) -> Reference:
    """What plain Keras makes of the whole batches: weights, "all" weights, history; `answers`: evaluate, predict."""

    def compute() -> dict[str, Any]:
        model, history = one_process(make, optimizer, data, fit or {}, compiled or {})
        everything = [v.numpy() for v in model.weights]
        found = {"weights": weights(model), "all": everything, "history": history}
        found["mean loss"] = float(np.mean(history["loss"]))
        if not answers:
            return found
        x, y, *weight = data
        evaluated = model.evaluate(
            x,
            y,
            sample_weight=weight[0] if weight else None,
            batch_size=BATCH,
            verbose=0,
            return_dict=True,
        )
        predicted = tf.nest.flatten(model.predict(x, batch_size=BATCH, verbose=0))
        return found | {"evaluate": evaluated, "predict": predicted}

    return reference(compute, data, any_size=True)


def apart(
    make: Callable[[], keras.Model],
    make_optimizer: Callable[[], Any],
    data: tuple,
    *,
    source: Callable[[], Any] | None = None,
    fit: dict[str, Any] | None = None,
    source_fit: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    compiled: Callable[[], dict[str, Any]] = dict,
    reference: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """How far Trainer is from plain Keras in weights, histories, evaluation and predictions.

    Args:
        data: (x, y[, sample_weight]) for both.
        source: what Trainer gets instead.
        fit: arguments of fit for both; `source_fit`: for the Trainer alone.
        trainer: more arguments of Trainer.
        compiled: makes loss, metrics and so on for both.
        reference: arguments of compile for plain Keras alone.
    """
    wanted = plain(make, make_optimizer(), data, fit, compiled() | (reference or {}), answers=True)
    trained = hvdtrain.Trainer(
        make,
        make_optimizer(),
        **{"loss": crossentropy(), "global_batch_size": BATCH, "seed": 1}
        | compiled()
        | (trainer or {}),
    )
    given = source() if source else data
    history = trained.fit(
        given,
        **{"epochs": EPOCHS, "shuffle": False, "verbose": 0} | (fit or {}) | (source_fit or {}),
    ).history
    evaluated = trained.evaluate(*data, verbose=0, return_dict=True)
    predicted = tf.nest.flatten(trained.predict(data[0]))
    return {
        "weights": wanted.apart(weights(trained.model), "weights"),
        "history": wanted.apart(history, "history", "relative"),
        "evaluate": wanted.apart(evaluated, "evaluate", "relative"),
        "predict": wanted.apart(predicted, "predict"),
        "histories": history,
    }


def relative(a: Any, b: Any) -> float:
    """Largest difference, relative above 1."""
    return far(np.asarray(a), np.asarray(b), "relative")


def vectors() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(8)
    return rng.normal(size=(EXAMPLES, 3)).astype("float32"), rng.normal(size=(EXAMPLES, 1)).astype(
        "float32"
    )


def vector_model() -> keras.Model:
    return keras.Sequential(
        [layers.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
    )
