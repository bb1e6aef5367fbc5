"""Training by model.fit with hvdtrain.keras and its callbacks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.collectives.replicas import fingerprints
from hvdtrain.errors import ReplicaError
from hvdtrain.keras_internals.variables import replicated_variables, seed_variables

RNG = np.random.default_rng(3)
X = RNG.normal(size=(96, 8)).astype("float32")
Y = (X[:, :3].sum(axis=1) > 0).astype("int32")


def shard() -> tuple[np.ndarray, np.ndarray]:
    return X[hvd.rank() :: hvd.size()], Y[hvd.rank() :: hvd.size()]


def network(statistics: bool = False, dropout: bool = False, units: int = 8) -> keras.Model:
    layers: list[Any] = [keras.Input((units,)), keras.layers.Dense(6, activation="tanh")]
    if statistics:
        layers.append(keras.layers.BatchNormalization(momentum=0.5))
    if dropout:
        layers.append(keras.layers.Dropout(0.3, seed=1))
    return keras.Sequential([*layers, keras.layers.Dense(2)])


def compiled(model: keras.Model, optimizer: Any, metrics: Any = ()) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=list(metrics), jit_compile=False)
    return model


def fit(model: keras.Model, *callbacks: Any, **kwargs: Any) -> dict[str, Any]:
    x, y = kwargs.pop("data", None) or shard()
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0} | kwargs
    return model.fit(x, y, callbacks=list(callbacks), **options).history


def error_of(model: keras.Model, *callbacks: Any, **kwargs: Any) -> str:
    """What the ReplicaError of fit says."""
    try:
        fit(model, *callbacks, **kwargs)
    except ReplicaError as error:
        return str(error)
    return "no error"


def bits(model: keras.Model) -> str:
    return fingerprints(replicated_variables(model)).tobytes().hex()


def broadcast(**kwargs: Any) -> hvd.callbacks.BroadcastGlobalVariablesCallback:
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0, **kwargs)


class CountBatches(keras.callbacks.Callback):
    count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1


def case_documented_example() -> dict[str, Any]:
    """Horovod's documented Keras example, with only the import changed."""
    keras.utils.set_random_seed(10 + hvd.rank())  # other initial weights on each rank
    hvd.init()
    model = network(statistics=True, dropout=True)
    opt = keras.optimizers.Adam(0.01 * hvd.size())
    opt = hvd.DistributedOptimizer(opt)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=opt,
        metrics=["accuracy"],
    )
    callbacks: list[Any] = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=0.01 * hvd.size(), warmup_epochs=2, verbose=1
        ),
    ]
    folder = Path(tempfile.mkdtemp())
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(str(folder / "checkpoint-{epoch}.keras")))
    history = model.fit(
        *shard(),
        batch_size=8,
        steps_per_epoch=12 // hvd.size(),
        callbacks=callbacks,
        epochs=4,
        verbose=1 if hvd.rank() == 0 else 0,
        validation_data=(X, Y),
    ).history
    files = sorted(p.name for p in folder.iterdir())
    return {"bits": bits(model), "history": history, "files": files}


def case_first_step_equals_one_process() -> float:
    """From different initial weights, one step equals that of one process with root's weights."""
    keras.utils.set_random_seed(20 + hvd.rank())
    model = compiled(network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    keras.utils.set_random_seed(20)
    reference = compiled(network(), keras.optimizers.SGD(0.1, momentum=0.9))
    fit(model, broadcast(), epochs=1, batch_size=96 // hvd.size())
    fit(reference, data=(X, Y), epochs=1, batch_size=96)
    pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
    return max(float(np.abs(mine - theirs).max()) for mine, theirs in pairs)


def case_validation_on_the_first_rank() -> list[str]:
    """As many scripts have it: rank 0 validates and keeps the best model, which the others do not wait for."""
    model = compiled(network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    best = keras.callbacks.ModelCheckpoint(
        str(Path(tempfile.mkdtemp()) / "best.keras"), save_best_only=True
    )
    is_first = hvd.rank() == 0
    history = fit(model, broadcast(), best, validation_data=(X, Y) if is_first else None)
    return sorted(history)


def case_root_rank_1() -> list[float]:
    keras.utils.set_random_seed(30 + hvd.rank())
    model = compiled(network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    fit(model, hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=1), epochs=1)
    keras.utils.set_random_seed(31)
    return [float(np.abs(model.get_weights()[0] - network().get_weights()[0]).max())]


def case_guard_without_reduction() -> dict[str, Any]:
    """The reduction is removed on purpose."""
    batches = CountBatches()
    message = error_of(compiled(network(), keras.optimizers.SGD(0.1)), broadcast(), batches)
    return {"message": message, "batches": batches.count}


def case_never_broadcast() -> dict[str, str]:
    """Without the callback: other first weights on each rank, those of one rank, and one that fit broadcasts late."""

    def late(batch: int, logs: Any) -> None:
        if batch == 0:
            hvd.broadcast_variables([*model.variables, *model.optimizer.variables], 0)

    found = {}
    for name in ("forgotten", "before", "late"):
        keras.utils.set_random_seed(hvd.rank())
        model = compiled(network(), hvd.DistributedOptimizer(keras.optimizers.Adam()))
        callbacks = []
        if name == "before":
            hvd.broadcast_variables(model.variables, 0)
        if name == "late":
            callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=late)]
        found[name] = error_of(model, *callbacks)
    return found


def case_adapted_statistics_were_broadcast() -> list[float]:
    """A layer that each rank has adapted to its own examples computes with what was broadcast."""
    x, y = shard()
    keras.utils.set_random_seed(hvd.rank())
    normalization = keras.layers.Normalization()
    normalization.adapt(x + 10 * hvd.rank())
    model = keras.Sequential([keras.Input(x.shape[1:]), normalization, keras.layers.Dense(2)])
    compiled(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    hvd.broadcast_variables(model.variables, 0)
    model.fit(x, y, verbose=0)
    found: list[float] = model.predict(np.ones((1, *x.shape[1:])), verbose=0)[0].tolist()
    return found


def case_guard_turned_off() -> str:
    return error_of(compiled(network(), keras.optimizers.SGD(0.1)), broadcast(guard=False))


def case_drift_in_the_middle() -> str:
    model = compiled(network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))

    class Drift(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and hvd.rank() == 1:
                model.layers[0].bias.assign_add(np.full(6, 1e-6))

    return error_of(model, broadcast(), Drift())


def case_other_number_of_steps() -> str:
    model = compiled(network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    return error_of(model, broadcast(), steps_per_epoch=5 if hvd.rank() == 1 else 4)


def case_other_input_shape() -> str:
    units = 8 if hvd.rank() == 0 else 7
    model = compiled(network(units=units), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x, y = shard()
    return error_of(model, broadcast(), data=(x[:, :units], y))


def case_other_accumulation() -> str:
    passes = 1 + hvd.rank()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes)
    return error_of(compiled(network(), optimizer), broadcast())


def case_loaded_on_one_rank() -> str:
    """The others make a new model: plain Keras does not know that the gradients of two batches are summed."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model = compiled(network(), optimizer)
    if hvd.rank() == 0:
        path = Path(tempfile.mkdtemp()) / "model.keras"
        model.save(path)
        model = keras.saving.load_model(path)
        hvd.DistributedOptimizer(model.optimizer)
    return error_of(model, broadcast())


def case_other_vocabulary() -> dict[str, str]:
    """Each rank adapts to its own data: with the callback, without it, and in a check by the script."""
    words = np.array([["a", "b", "c", "d"][i % 4] for i in range(24)])
    lookup = keras.layers.StringLookup()
    lookup.adapt(words[hvd.rank() :: 2])
    layers = [keras.Input((1,), dtype="string"), lookup, keras.layers.Embedding(5, 2)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(2)])
    compiled(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    data = (words[:, None], np.arange(24) % 2)
    found = {
        "guarded": error_of(model, broadcast(), data=data),
        "alone": error_of(model, data=data),
    }
    try:
        hvd.check_replicas(model)
    except ReplicaError as error:
        found["checked"] = str(error)
    return found


def case_missing_metric() -> str:
    metrics = ["accuracy"] if hvd.rank() == 0 else []
    model = compiled(network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), metrics)
    return error_of(model, broadcast(), hvd.callbacks.MetricAverageCallback())


def case_one_rank_stops_early() -> str:
    model = compiled(network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            model.stop_training = hvd.rank() == 1

    return error_of(model, broadcast(), Stop(), epochs=3)


def case_metric_average() -> list[float]:
    callback = hvd.callbacks.MetricAverageCallback()
    logs: dict[str, Any] = {"b": 1.0 + hvd.rank(), "a": np.float32(hvd.rank()), "c": float("nan")}
    callback.on_epoch_end(0, logs)
    return [logs["a"], logs["b"], str(logs["c"])]


def case_seeds() -> dict[str, Any]:
    keras.utils.set_random_seed(40)
    model = compiled(network(dropout=True), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    before = np.array(seed_variables(model)[0])
    callback = broadcast()
    callback.set_model(model)
    callback.set_params({"steps": 1, "epochs": 1})
    callback.on_train_begin()
    unchanged = (np.array(seed_variables(model)[0]) == before).all()
    mask = np.asarray(model.layers[1](np.ones((1, 20), "float32"), training=True))
    return {"unchanged": bool(unchanged), "mask": mask.tolist()}


def case_statistics_are_averaged() -> dict[str, Any]:
    model = compiled(network(statistics=True), hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    fit(model, broadcast(), epochs=1, batch_size=48)
    normalization = model.layers[1]
    hidden = np.asarray(model.layers[0](X))
    parts = [hidden[r :: hvd.size()].mean(axis=0) for r in range(hvd.size())]
    expected = 0.5 * np.mean(parts, axis=0)  # momentum 0.5, from 0
    gap = np.abs(np.asarray(normalization.moving_mean) - expected).max()
    return {"bits": bits(model), "gap": float(gap)}


def case_frozen_layer_that_differs() -> str:
    """Averaging must not hide that frozen weights are not the same."""
    model = network()
    model.layers[0].trainable = False
    compiled(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))

    class Disturb(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 0 and hvd.rank() == 1:
                model.layers[0].bias.assign_add(np.ones(6))

    return error_of(model, broadcast(), Disturb())


def case_no_false_alarms() -> dict[str, str]:
    """The guard stays quiet where replicas are right."""
    found: dict[str, str] = {}

    def check(name: str, model: keras.Model, callback: Any = None) -> None:
        found[name] = error_of(model, callback or broadcast())

    passes = hvd.DistributedOptimizer(keras.optimizers.Adam(), backward_passes_per_step=4)
    check("in the middle of an accumulation", compiled(network(), passes))  # 6 steps an epoch

    model = network()
    local = hvd.PartialDistributedOptimizer(keras.optimizers.Adam(), local_layers=model.layers[0])
    check("local layer", compiled(model, local))
    check("local layer again", model)

    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=2.0**10)
    check("loss scale", compiled(network(True), hvd.DistributedOptimizer(scaled)))

    average = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3)
    check("moving average", compiled(network(True, True), hvd.DistributedOptimizer(average)))

    model = network(True)
    model.layers[0].trainable = False
    kept = model.layers[0].kernel
    kept.assign(np.full(kept.shape, float(hvd.rank())))
    compiled(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    check("callback's local variable", model, broadcast(local_variables=kept))
    found["it kept its value"] = str(float(np.asarray(kept)[0, 0]) == hvd.rank())
    return found


def case_best_model_checkpoint() -> list[str]:
    model = compiled(network(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    folder = Path(tempfile.mkdtemp())
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    callback.filepath = folder / f"best-{os.getpid()}.keras"
    fit(model, broadcast(), hvd.callbacks.MetricAverageCallback(), callback)
    return [p.suffix for p in folder.iterdir()]
