"""The collectives of hvdtrain.keras, SyncBatchNormalization and load_model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from references import reference
from results import Apart

import hvdtrain.keras as hvd
from hvdtrain.collectives.replicas import fingerprints
from hvdtrain.collectives.step_context import Step, in_step
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.variables import replicated_variables

RNG = np.random.default_rng(5)
X = (RNG.normal(size=(32, 6)) * 3 + 7).astype("float32")
Y = RNG.normal(size=(32, 2)).astype("float32")


def case_eager_collectives() -> dict[str, Any]:
    rank = float(hvd.rank())
    variable = keras.Variable([rank, 2.0])
    large = np.full(40_000, 1.0 + rank, "float32")
    return {
        "average": hvd.allreduce([rank, 1.0]).numpy().tolist(),
        "sum": hvd.allreduce(np.int64(3), op=hvd.Sum).numpy().tolist(),
        "average=False": float(hvd.allreduce(1.0, average=False)),
        "max": float(hvd.allreduce(rank, op=hvd.Max, name="max")),
        "min": float(hvd.allreduce(rank, op=hvd.Min)),
        "product": float(hvd.allreduce(rank + 2.0, op=hvd.Product)),
        "scaled": float(hvd.allreduce(1.0, prescale_factor=3.0, postscale_factor=0.5)),
        "variable": hvd.allreduce(variable).numpy().tolist(),
        "fp16": float(hvd.allreduce(large, compression=hvd.Compression.fp16)[0]),
        "bf16": sorted(
            set(hvd.allreduce(large, compression=hvd.Compression.bf16).numpy().tolist())
        ),
        "bf16 sum": float(
            hvd.allreduce(3.0, op=hvd.Sum, compression=hvd.Compression.bf16, postscale_factor=2.0)
        ),
        "bf16 of integers": int(hvd.allreduce(1000, op=hvd.Sum, compression=hvd.Compression.bf16)),
        "bfloat16": hvd.allreduce(tf.constant([1.5], tf.bfloat16)).dtype.name,
        "gather": hvd.allgather(np.full((1 + hvd.rank(), 2), rank)).numpy().tolist(),
        "gather bfloat16": hvd.allgather(tf.constant([rank], tf.bfloat16)).numpy().tolist(),
        "a sum as in horovod.tensorflow": error_of(lambda: hvd.allreduce(1.0, False)),
        "gather a scalar": error_of(lambda: hvd.allgather(rank)),
        "broadcast": hvd.broadcast(variable, 1).numpy().tolist(),
        "broadcast bool": bool(hvd.broadcast(hvd.rank() == 1, 1, name="flag")),
        "scatter": hvd.reducescatter([[rank], [rank + 10]]).numpy().tolist(),
        "scatter sum": hvd.reducescatter([[rank], [rank + 10]], op=hvd.Sum).numpy().tolist(),
        "object": hvd.broadcast_object({"epoch": hvd.rank(), "name": "a"}, root_rank=1),
        "objects": hvd.allgather_object([hvd.rank()]),
        "object as it was": repr(hvd.broadcast_object({0: [1, (2, b"3")], None: np.arange(2)})),
        "one rank cannot send": error_of(lambda: hvd.allgather_object([hvd, 1][hvd.rank()])),
    }


def error_of(function: Any) -> str:
    try:
        return f"no error, {function()}"
    except UsageError as error:
        return str(error)


def case_graph_collectives() -> dict[str, Any]:
    """Constants and two of a kind in one graph: nothing is folded, no name comes twice."""

    @tf.function
    def compute(value: tf.Tensor) -> tuple[tf.Tensor, ...]:
        constant = hvd.allreduce(tf.constant(1.0), op=hvd.Sum)
        first = hvd.allreduce(value, op=hvd.Sum)
        gathered = hvd.allgather(tf.constant([2.0]))
        received = hvd.broadcast(tf.constant(3.0), 0)
        scattered = hvd.reducescatter(tf.constant([[1.0], [2.0]]), op=hvd.Sum)
        return constant, first, gathered, received, scattered

    values = compute(tf.constant(float(hvd.rank())))
    again = compute(tf.constant(float(hvd.rank())))
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(values, again, strict=True))
    return {"values": [v.numpy().tolist() for v in values]}


def layer_model(layer: keras.layers.Layer, seed: int = 1) -> keras.Model:
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    hidden = layer(hidden)
    hidden = layer(keras.layers.Dense(5)(hidden))  # the same layer twice
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


def largest_gap(one: keras.Model, other: keras.Model) -> float:
    pairs = zip(one.weights, other.weights, strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def values_of(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy() for v in model.weights]


def case_sync_batch_norm_equals_one_process() -> dict[str, Apart]:
    found: dict[str, Apart] = {}
    if hvd.rank() == 1:
        # An extra layer on one rank must not change anybody's names.
        hvd.SyncBatchNormalization()(keras.Input((3,)))
    x, y = X[hvd.rank() :: hvd.size()], Y[hvd.rank() :: hvd.size()]
    options: dict[str, Any] = {"shuffle": False, "verbose": 0, "epochs": 2}
    for eager in (False, True):

        def one_process(eager: bool = eager) -> dict[str, Any]:
            whole = layer_model(keras.layers.BatchNormalization(momentum=0.8))
            sgd = keras.optimizers.SGD(0.05, momentum=0.9)
            whole.compile(sgd, "mse", jit_compile=False, run_eagerly=eager)
            whole.fit(X, Y, batch_size=8, **options)
            return {"weights": values_of(whole)}

        wanted = reference(one_process, any_size=True)
        for kind in (hvd.SyncBatchNormalization, keras.layers.BatchNormalization):
            mine = layer_model(kind(momentum=0.8))
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
            mine.compile(optimizer, "mse", jit_compile=False, run_eagerly=eager)
            mine.fit(x, y, batch_size=8 // hvd.size(), **options)
            found[f"{kind.__name__} {eager=}"] = wanted.apart(values_of(mine), "weights")
    return found


def case_sync_batch_norm_uneven() -> dict[str, float]:
    """3 of 16 examples on rank 0 and 13 on rank 1, each loss weighted by its share."""
    splits = [0, 3, 16]

    def train(model: keras.Model, x: Any, y: Any, weight: float, tape_of: Any) -> None:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tape_of(tf.GradientTape()) as tape:
                loss = weight * tf.reduce_mean(tf.square(model(x, training=True) - y))
            sources = model.trainable_variables
            gradients = tape.gradient(loss, [v.value for v in sources])
            optimizer.apply_gradients(zip(gradients, sources, strict=True))

        for _ in range(5):
            step(tf.constant(x), tf.constant(y))

    rows = slice(splits[hvd.rank()], splits[hvd.rank() + 1])
    weight = (rows.stop - rows.start) / 16
    mine = layer_model(hvd.SyncBatchNormalization())
    train(mine, X[rows], Y[rows], weight, lambda t: hvd.DistributedGradientTape(t, op=hvd.Sum))
    whole = layer_model(keras.layers.BatchNormalization())
    train(whole, X[:16], Y[:16], 1.0, lambda t: t)
    bits = fingerprints(replicated_variables(mine)).tobytes().hex()
    return {"gap": largest_gap(mine, whole), "equal": hvd.allgather_object(bits) == [bits] * 2}


def case_sync_batch_norm_moments() -> dict[str, float]:
    """Against NumPy in float64: images, channels first, masks, a large mean, an idle rank."""
    found: dict[str, float] = {}

    def check(name: str, data: np.ndarray, axis: int = -1, mask: Any = None, **kwargs: Any) -> None:
        idle = kwargs.get("idle", -1)
        layer = hvd.SyncBatchNormalization(axis=axis, momentum=0.0)
        layer.build(data.shape)
        cut = 1 if len(data) > 1 else 0
        rows = [slice(0, cut), slice(cut, None)][hvd.rank()]
        if idle >= 0:
            rows = slice(0, 1) if hvd.rank() == idle else slice(None)
        part = None if mask is None else tf.constant(mask[rows])
        share = 0.0 if hvd.rank() == idle else 0.3
        with in_step(Step(tf.constant(share), lambda total: total, True) if idle >= 0 else None):
            layer(tf.constant(data[rows]), training=True, mask=part)
        flat = np.moveaxis(data, axis, -1).reshape(-1, data.shape[axis]).astype("float64")
        if mask is not None:
            flat = flat[mask.ravel()]
        mean, variance = flat.mean(axis=0), flat.var(axis=0)
        found[name] = max(
            float(np.abs(np.asarray(layer.moving_mean) / mean - 1).max()),
            float(np.abs(np.asarray(layer.moving_variance) / variance - 1).max()),
        )

    images = RNG.normal(size=(5, 4, 4, 3)).astype("float32") + 2
    check("images", images)
    check("channels first", np.moveaxis(images, -1, 1), axis=1)
    check("large mean", (RNG.normal(size=(4000, 2)) + 1000).astype("float32"))
    sequences = RNG.normal(size=(6, 5, 3)).astype("float32") + 1
    check("mask", sequences, mask=RNG.random((6, 5)) < 0.6)
    holes = np.where((RNG.random((6, 5)) < 0.5)[..., None], sequences, np.float32(np.nan))
    check("masked nan", holes, mask=~np.isnan(holes[..., 0]))
    nothing = np.ones((6, 5), bool)
    nothing[0] = False
    check("all of rank 0 masked", sequences, mask=nothing)
    check("idle rank", sequences, idle=1)
    check("float64", images.astype("float64"))
    return found


def case_inference_needs_no_other_rank() -> str:
    layer = hvd.SyncBatchNormalization()
    if hvd.rank() == 0:
        layer(np.ones((2, 3), "float32"))
        keras.Sequential([keras.Input((3,)), layer]).predict(np.ones((2, 3), "float32"), verbose=0)
    return "done"


def case_automatic_jit_is_off() -> bool:
    model = layer_model(hvd.SyncBatchNormalization())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    model.fit(X, Y, batch_size=16, epochs=1, verbose=0)
    return bool(model.jit_compile)


def case_load_model_goes_on() -> dict[str, Any]:
    """Three epochs equal one epoch, save, load and two more; Adam, so that momenta count."""
    x, y = X[hvd.rank() :: hvd.size()], Y[hvd.rank() :: hvd.size()]
    found: dict[str, Any] = {}
    for ending in ("keras", "h5"):
        path = str(Path(tempfile.mkdtemp()) / f"model.{ending}")
        model = layer_model(keras.layers.Activation("relu"))
        model.compile(
            hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
            keras.losses.MeanSquaredError(),
            jit_compile=False,
        )
        options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "verbose": 0}
        model.fit(x, y, epochs=1, **options)
        model.save(path)
        model.fit(x, y, epochs=2, **options)
        loaded = hvd.load_model(path, compression=hvd.Compression.none)
        loaded.fit(x, y, epochs=2, **options)
        hvd.check_replicas(loaded)
        found[ending] = largest_gap(model, loaded)
    return found
