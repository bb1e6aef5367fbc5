"""Layers split over ranks, as data 2 x tensor 2 and as tensor 4, against the whole model in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from references import Reference, reference
from results import Apart
from small import RANK, crossentropy, difference, layers, optimizers

import hvdtrain
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.mesh import Mesh, position
from hvdtrain.errors import HvdtrainError
from hvdtrain.keras_internals.shards import shard_of
from hvdtrain.parallel.tensor.convert import convert
from hvdtrain.parallel.tensor.dense import ColumnParallelDense, RowParallelDense

HYBRID, WIDE = Mesh(data=2, tensor=2), Mesh(tensor=4)
MESHES = {"2x2": HYBRID, "4": WIDE}
WORDS, LENGTH, CLASSES, BATCH = 24, 6, 5, 5
PLAN = {
    "words": "vocabulary",
    "block/attention": "heads",
    "block/(up|gate)": "column",
    "block/down": "row",
}
MORE = PLAN | {"shades": "column", "lone": "row", "wide": "column"}
_rng = np.random.default_rng(1)
# Two copies of the model have 3 and 2 examples of a batch; of an epoch's last one 2 and 2.
X = _rng.integers(0, WORDS, (29, LENGTH)).astype("int32")
Y = _rng.integers(0, CLASSES, 29)


def block(width: int, dropout: float) -> keras.Model:
    """One transformer block, with a gated MLP: up and gate meet, split, before down.

    Biases begin as anything but 0, which it would not matter to add once too often.
    """
    x = inputs = keras.Input((LENGTH, width))
    h = layers.LayerNormalization(name="first")(x)
    attention = layers.MultiHeadAttention(
        4,
        3,
        dropout=dropout,
        name="attention",
        kernel_regularizer=keras.regularizers.L2(0.01),
        bias_initializer="random_normal",
    )
    x = layers.Add()([x, attention(h, h)])
    h = layers.LayerNormalization(name="second")(x)
    penalty = keras.regularizers.L1L2(0.001, 0.002)
    norm = keras.constraints.MaxNorm(0.9)
    up = layers.Dense(16, kernel_regularizer=penalty, kernel_constraint=norm, name="up")(h)
    gate = layers.Dense(16, activation="sigmoid", name="gate")(h)
    h = layers.Multiply()([keras.activations.gelu(up), gate])
    h = layers.Dropout(dropout)(h)
    down = layers.Dense(width, activation="tanh", bias_initializer="random_normal", name="down")
    return keras.Model(inputs, layers.Add()([x, down(h)]), name="block")


def make(dropout: float = 0.0, more: bool = True) -> Callable[[], keras.Model]:
    """An embedding and a block; `more`: with other split layers before and behind them."""

    def model() -> keras.Model:
        keras.utils.set_random_seed(7)
        words = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, 8, mask_zero=True, name="words")(words)
        if more:
            x = layers.Add()([x, layers.Embedding(WORDS, 8, mask_zero=True, name="shades")(words)])
        x = block(8, dropout)(x)
        if more:
            x = layers.Dense(8, activation="relu", bias_initializer="random_normal", name="lone")(x)
        x = layers.GlobalAveragePooling1D()(x)
        if more:
            # Softmax looks at all columns.
            x = layers.Dense(12, activation="softmax", name="wide")(x)
        return keras.Model(words, layers.Dense(CLASSES, name="logits")(x))

    return model


def whole(value: Any, variable: Any, ranks: Any) -> np.ndarray:
    """What the ranks' parts of `variable`, or of its gradient, make together."""
    value, shard = tf.convert_to_tensor(value), shard_of(variable)
    if shard is None:
        return value.numpy()
    parts = ranks.allgather(value[tf.newaxis], "parts").numpy()
    return np.concatenate(list(parts), axis=shard.axis)


def relative(mine: np.ndarray, theirs: np.ndarray, least: float) -> float:
    """How far they are apart, relative to the largest of `theirs`, or to `least` if that is more."""
    assert mine.shape == theirs.shape, (mine.shape, theirs.shape)
    return difference([mine], [theirs]) / max(least, float(np.abs(theirs).max()))


def outputs_and_gradients(model: keras.Model) -> tuple[Any, list[Any], Any]:
    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = crossentropy()(y, logits) + tf.add_n(model.losses)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        return logits, [tf.convert_to_tensor(g) for g in gradients], loss

    return step(tf.constant(X), tf.constant(Y))


def whole_step() -> dict[str, Any]:
    """What the whole model in one process computes."""
    model = make(0.3)()
    weights = [v.numpy() for v in model.trainable_variables]
    logits, gradients, loss = outputs_and_gradients(model)
    found = {"outputs": [logits], "loss": [loss], "weights": weights, "gradients": gradients}
    return {name: [np.asarray(v).tolist() for v in values] for name, values in found.items()}


def case_forward_and_gradients() -> dict[str, dict[str, float]]:
    """In training, with dropout between and on split activations."""
    theirs = ALL_RANKS.exchange(whole_step() if RANK == 0 else None, "whole step")[0]
    found = {}
    for name, mesh in MESHES.items():
        here = position(mesh)
        model = convert(make(0.3), MORE, here)

        def apart(mine: list[Any], wanted: str, least: float) -> dict[str, float]:
            held = zip(mine, model.trainable_variables, theirs[wanted], strict=True)  # noqa: B023
            return {
                v.path: relative(whole(value, v, here.tensor_set), np.array(other), least)  # noqa: B023
                for value, v, other in held
            }

        weights = apart([v.value for v in model.trainable_variables], "weights", 1.0)
        logits, gradients, loss = outputs_and_gradients(model)
        found[name] = {
            "weights": max(weights.values()),
            "outputs": difference([logits], theirs["outputs"]),
            "loss": difference([loss], theirs["loss"]),
        } | apart(gradients, "gradients", 1e-3)
    return found


def case_what_stays_split() -> dict[str, Any]:
    model = convert(make(), MORE, position(WIDE))
    inner = model.get_layer("block")
    return {
        "up": inner.get_layer("up").gather_output,
        "gate": inner.get_layer("gate").gather_output,
        "down": inner.get_layer("down").input_is_split,
        "lone": model.get_layer("lone").input_is_split,
        "wide": model.get_layer("wide").gather_output,
        "sizes": {v.path: int(np.prod(v.shape)) for v in model.trainable_variables},
    }


def sgd() -> Any:
    return optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3)


def adamw() -> Any:
    # A gradient that is 0 but for rounding (of the keys' bias) would else be made a step of its noise.
    inner = optimizers.AdamW(1e-2, weight_decay=0.01, clipnorm=0.05, epsilon=1e-4)
    return optimizers.LossScaleOptimizer(inner, initial_scale=8.0)


# Name -> mesh, optimizer, dropout.
TRAININGS: dict[str, tuple[Mesh, Callable[[], Any], float]] = {
    "sgd hybrid": (HYBRID, sgd, 0.0),
    "adamw tensor": (WIDE, adamw, 0.2),
}
EPOCHS = 5  # Of 6 steps.


def one_process(name: str) -> Reference:
    """What plain Keras makes of the whole model in one process."""
    _, optimizer, dropout = TRAININGS[name]

    def compute() -> dict[str, Any]:
        model = make(dropout, more=False)()
        model.compile(optimizer(), crossentropy(), metrics=["accuracy"], jit_compile=False)
        history = model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
        return {
            "weights": {v.path: v.numpy() for v in model.trainable_variables},
            "history": history.history,
            "predicted": model(X).numpy(),
            "evaluated": model.evaluate(X, Y, batch_size=BATCH, verbose=0),
        }

    return reference(compute)


def case_training() -> dict[str, dict[str, Apart]]:
    """Each training by a Trainer on its mesh against the whole model's: 30 steps on the same batches."""
    found = {}
    for name, (mesh, optimizer, dropout) in TRAININGS.items():
        wanted = one_process(name)
        trainer = hvdtrain.Trainer(
            make(dropout, more=False),
            optimizer(),
            crossentropy(),
            metrics=["accuracy"],
            global_batch_size=BATCH,
            layout=hvdtrain.Layout(mesh, PLAN),
        )
        history = trainer.fit(X, Y, epochs=EPOCHS, shuffle=False, verbose=0).history
        ranks = position(mesh).tensor_set
        weights = {v.path: whole(v.value, v, ranks) for v in trainer.model.trainable_variables}
        found[name] = {
            "weights": wanted.apart(weights, "weights", "relative"),
            "history": wanted.apart(history, "history"),
        }
        if name == "sgd hybrid":
            evaluated = trainer.evaluate(X, Y, verbose=0)
            found[name] |= {
                "evaluated": wanted.apart(evaluated, "evaluated"),
                "predicted": wanted.apart(trainer.predict(X), "predicted"),
            }
    return found


def small_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu", name="up"),
            layers.Dense(4, name="down"),
            layers.BatchNormalization(name="normal"),
            layers.Dropout(0.5),
        ]
    )


def small_trainer(
    optimizer: Any, mesh: Mesh = HYBRID, loss: Any = "mse", **kwargs: Any
) -> hvdtrain.Trainer:
    layout = hvdtrain.Layout(mesh, {"up": "column", "down": "row"})
    return hvdtrain.Trainer(
        small_model, optimizer, loss, global_batch_size=4, layout=layout, **kwargs
    )


def centred(y: Any, p: Any) -> Any:
    """Compares each example with the mean of the batch."""
    return keras.ops.mean(keras.ops.square(p - keras.ops.mean(p, axis=0)))


def case_what_ranks_have_in_common() -> dict[str, Any]:
    """Statistics, seeds, the guard, and the vote on finite gradients, of one small model."""
    trainer = small_trainer(optimizers.LossScaleOptimizer(optimizers.SGD(0.0)))
    data = np.arange(16, dtype="float32").reshape(4, 4)
    trainer.fit(data, data, shuffle=False, verbose=0)
    model = trainer.model
    keras.utils.set_random_seed(0)
    reference = small_model()
    reference(data, training=True)
    means = [m.get_layer("normal").moving_mean.numpy() for m in (model, reference)]
    seeds = [v.numpy().tolist() for v in model.variables if "seed" in v.path]
    said = {"before": complaint(lambda: trainer.strategy.check(model, "now"))}
    up, down = model.get_layer("up"), model.get_layer("down")
    for name, variable in (("whole", down.bias), ("part", up.variables[0])):
        if RANK == 3:
            variable.assign(variable + 1.0)
        said[name] = complaint(lambda: trainer.strategy.check(model, "now"))
        trainer.strategy.broadcast(model)
        said[f"{name} broadcast"] = complaint(lambda: trainer.strategy.check(model, "now"))
    gradients = [tf.constant([np.inf if RANK == 3 else 1.0])]
    return {
        "mean": difference(means[:1], means[1:]),
        "largest": float(max(means[1])),
        "seed": seeds,
        "said": said,
        "finite": bool(model.optimizer.check_finite(gradients)),
    }


def complaint(function: Callable[[], Any]) -> str:
    try:
        function()
    except HvdtrainError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def case_sharded_state_of_split_layers() -> float:
    """How far ZeRO-1 on top of split layers is from split layers alone, with a clip that looks at all."""

    def weights(**kwargs: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        trainer = small_trainer(optimizers.Adam(0.01, global_clipnorm=0.1), **kwargs)
        data = np.arange(32, dtype="float32").reshape(8, 4) / 8
        trainer.fit(data, data, epochs=2, shuffle=False, verbose=0)
        return [v.numpy() for v in trainer.model.trainable_variables]

    return difference(weights(), weights(shard_optimizer=True))


def case_errors() -> dict[str, str]:
    return {
        "lamb": complaint(lambda: small_trainer(optimizers.Lamb())),
        "ranks": complaint(lambda: small_trainer("sgd", Mesh(tensor=8))),
        "whole batch": complaint(
            lambda: small_trainer("sgd", loss=centred).fit(np.eye(4), np.eye(4), verbose=0)
        ),
    }


def case_by_hand() -> dict[str, float]:
    """The layers in code of one's own, eager and in a tf.function, in bfloat16 as well."""
    found = {}
    group = position(WIDE).tensor_set
    x = np.random.default_rng(2).normal(size=(3, 8)).astype("float32")
    for policy in ("float32", "mixed_bfloat16"):

        def dense(units: int, seed: int, kind: Any = layers.Dense, **kwargs: Any) -> Any:
            start = keras.initializers.GlorotUniform(seed=seed)
            return kind(units, kernel_initializer=start, dtype=policy, **kwargs)  # noqa: B023

        whole = keras.Sequential([dense(8, 1), dense(4, 2), dense(8, 3)])
        split = keras.Sequential(
            [
                dense(8, 1, ColumnParallelDense, group=group, gather_output=False),
                dense(4, 2, RowParallelDense, group=group, input_is_split=True),
                dense(8, 3, ColumnParallelDense, group=group),
            ]
        )
        expected = whole(x)
        for name, function in (("eager", split), ("function", tf.function(split))):
            found[f"{policy} {name}"] = difference(
                [tf.cast(function(x), tf.float32)], [tf.cast(expected, tf.float32)]
            )
    return found


def case_grouped_attention() -> dict[str, float]:
    def model() -> keras.Model:
        keras.utils.set_random_seed(3)
        x, y = keras.Input((5, 6)), keras.Input((4, 6))
        attention = layers.GroupQueryAttention(3, 8, 4, dropout=0.4, name="attention")
        both, scores = attention(x, y, return_attention_scores=True)
        return keras.Model([x, y], [both, scores])

    rng = np.random.default_rng(4)
    inputs = [rng.normal(size=(2, 5, 6)), rng.normal(size=(2, 4, 6))]
    mine = convert(model, {"attention": "heads"}, position(WIDE))(inputs, training=True)
    theirs = model()(inputs, training=True)
    return {
        "output": difference([mine[0]], [theirs[0]]),
        "scores": difference([mine[1]], [theirs[1]]),
    }


def case_unknown_word() -> str:
    model = convert(make(), MORE, position(WIDE))
    try:
        model(np.full((1, LENGTH), WORDS, "int32"))
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return ""
