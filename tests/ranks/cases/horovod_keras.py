"""What Horovod's own tests of its Keras module ask for, on Keras 3; each rank knows what the others do."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from references import reference
from results import Apart
from small import weights

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.collectives import first_rank

RANK, SIZE = hvd.rank(), hvd.size()


class Adding(keras.optimizers.Optimizer):
    """Adds the gradient to the variable."""

    def __init__(self, learning_rate: float = 1.0, name: str = "adding") -> None:
        super().__init__(learning_rate, name=name)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(variable, tf.convert_to_tensor(gradient))


def case_learning_rates_of_20_epochs() -> dict[str, Any]:
    """Warm-up, two steps down, and a schedule of the epoch; metrics are averaged."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam())
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2), keras.layers.RepeatVector(3)]
    )
    metrics = ["categorical_accuracy"]
    # With an argument that Horovod's examples pass, and Keras 3 does not know.
    model.compile(
        optimizer, "mse", metrics=metrics, jit_compile=False, experimental_run_tf_function=False
    )
    rates: list[float] = []

    class Store(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    first = 0.1 * SIZE

    def schedule(multiplier: Any, start: int, end: int) -> Any:
        return hvd.callbacks.LearningRateScheduleCallback(first, multiplier, start, end)

    rng = np.random.default_rng(RANK)
    history = model.fit(
        rng.random((10, 3)),
        rng.random((10, 3, 2)),
        batch_size=2,
        steps_per_epoch=5,
        epochs=20,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(first, warmup_epochs=5),
            schedule(1e-1, 5, 10),
            schedule(1e-2, 10, 15),
            schedule(lambda epoch: epoch, 15, 20),
            Store(),
        ],
    ).history
    return {"rates": rates, "losses": history["loss"]}


def aggregating_step(optimizer: Any, variables: list[keras.Variable]) -> Any:
    dense, table, local, local_table = variables

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            # tf.gather: its gradient is sparse.
            rows = tf.gather(table.value, [0]) + tf.gather(local_table.value, [0])
            loss = dense + local - float(RANK + 1) * rows
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    return step


def case_aggregation() -> dict[str, list[float]]:
    """Gradients of ten steps, four for an update; dense and sparse, shared and local variables."""
    found = {}
    for average in (True, False):
        optimizer = hvd.DistributedOptimizer(
            Adding(),
            backward_passes_per_step=4,
            average_aggregated_gradients=average,
            sparse_as_dense=True,
        )
        shared, table = keras.Variable([0.0]), keras.Variable([1.0, 2.0])
        local, local_table = keras.Variable([0.0]), keras.Variable([1.0, 2.0])
        variables = [shared, table, local, local_table]
        for variable in (local, local_table):
            optimizer.register_local_var(variable)
        optimizer.build(variables)

        step = aggregating_step(optimizer, variables)
        for _ in range(10):
            step()
        found[str(average)] = [float(n) for v in variables for n in np.asarray(v)]
    return found


def case_an_infinite_gradient_is_forgotten() -> float:
    """The next accumulation begins at 0, not at inf times 0."""
    optimizer = hvd.DistributedOptimizer(Adding(), backward_passes_per_step=2, sparse_as_dense=True)
    variable = keras.Variable(0.0)
    optimizer.build([variable])
    for number, gradient in enumerate([np.inf, 1.0, 1.0, 1.0]):
        if number == 2:
            variable.assign(0.0)
        optimizer.apply([tf.constant(gradient)], [variable])
    return float(variable)


def case_sparse_as_dense() -> list[Any]:
    """An embedding, every batch on its own and two at a time."""
    results = []
    for passes in (1, 2):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((10,)), keras.layers.Embedding(50, 4)])
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.RMSprop(1e-2), sparse_as_dense=True, backward_passes_per_step=passes
        )
        model.compile(optimizer, "mse", jit_compile=False)
        rng = np.random.default_rng(RANK)
        for _ in range(3):
            model.train_on_batch(rng.integers(0, 50, (8, 10)), rng.random((8, 10, 4)))
        hvd.check_replicas(variables=model.trainable_variables)
        results.append(int(optimizer.iterations))
    return results


def case_elastic_state() -> dict[str, Any]:
    found = {}
    for state_class in (hvd.elastic.KerasState, hvd.elastic.TensorFlowKerasState):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")])
        for variable in model.variables:
            variable.assign(np.full(variable.shape, 1.0 + RANK))
        optimizer = keras.optimizers.Adam(0.001 * SIZE)
        state = state_class(model, optimizer, batch=20 + RANK, epoch={10: (RANK, b"x")})
        state.sync()

        def seen(model: Any = model, state: Any = state) -> Any:
            return [
                float(np.mean([np.mean(w) for w in model.get_weights()])),
                state.batch,
                repr(state.epoch),
            ]

        synced = seen()
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        state.batch = 21
        state.restore()
        restored = seen()
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        state.batch = 22
        state.commit()
        state.restore()
        found[state_class.__name__] = [synced, restored, seen()]
    return found


def case_elastic_state_while_gradients_wait() -> dict[str, list[float]]:
    """Rank 0 has trained a batch of two when rank 1 joins; with a tape, whose optimizer is plain, likewise."""
    found = {}
    for name, wrap in (("optimizer", hvd.DistributedOptimizer), ("tape", lambda plain: plain)):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = wrap(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
        model.compile(optimizer, "mse", jit_compile=False)
        model.set_weights([np.full((1, 1), 2.0)])
        state = hvd.elastic.KerasState(model)
        if RANK == 0:
            optimizer.apply([tf.constant([[0.5]])], model.trainable_variables)
        state.sync()
        optimizer.apply([tf.constant([[1.0]])], model.trainable_variables)
        found[name] = [float(np.mean(w)) for w in model.get_weights()]
    return found


def case_broadcast_with_local_variables() -> dict[str, list[float]]:
    """All layers are frozen: what is seen after fit is what was broadcast."""
    layers = keras.layers
    start = keras.initializers.Constant(RANK)
    options: dict[str, Any] = {"kernel_initializer": start, "bias_initializer": start}
    dense = [layers.Dense(3, trainable=False, **options) for _ in range(3)]
    model = keras.Sequential(
        [keras.Input((3,)), *dense, layers.RepeatVector(3), layers.Dense(3, **options)]
    )
    model.layers[-1].trainable = False
    model.compile(
        keras.optimizers.SGD(), "mse", metrics=["categorical_accuracy"], jit_compile=False
    )
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(
        root_rank=SIZE - 1, local_variables=dense[0].variables
    )
    model.fit(np.ones((1, 3)), np.ones((1, 3, 3)), callbacks=[callback], verbose=0)
    return {
        "local": sorted({float(n) for v in dense[0].variables for n in np.ravel(v)}),
        "shared": sorted({float(n) for v in model.variables[2:] for n in np.ravel(v)}),
    }


def case_optimizer_of_a_process_set() -> dict[str, list[float]]:
    """Rank 0 is the whole set; a rank outside goes on with its own gradient."""
    ranks = hvd.add_process_set([0])
    found = {}
    for passes in (1, 2):
        optimizer = hvd.DistributedOptimizer(
            Adding(), process_set=ranks, backward_passes_per_step=passes
        )
        variable = keras.Variable([0.0])
        optimizer.build([variable])
        for _ in range(2):
            optimizer.apply([tf.constant([1.0 + RANK])], [variable])
        found[str(passes)] = [float(variable[0])]
    with hvd.DistributedGradientTape(tf.GradientTape(), process_set=ranks) as tape:
        loss = variable.value[0] * (1.0 + RANK)
    found["tape"] = tape.gradient(loss, [variable])[0].numpy().tolist()
    hvd.remove_process_set(ranks)
    return found


def case_only_the_first_rank_writes() -> dict[str, Any]:
    """The same script on all ranks, the same paths; then again from its backup, and a plain model writes as ever."""
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    x = np.random.default_rng(RANK).normal(size=(8, 2)).astype("float32")

    def callbacks(folder: Path, backup: bool = True) -> list[Any]:
        kinds = keras.callbacks
        return [
            kinds.ModelCheckpoint(folder / "{epoch}.keras"),
            kinds.CSVLogger(folder / f"log-{RANK}.csv"),
            *(
                [kinds.BackupAndRestore(folder / "backup", delete_checkpoint=False)]
                if backup
                else []
            ),
        ]

    def trained(epochs: int, backup: bool) -> tuple[keras.Model, list[int]]:
        keras.utils.set_random_seed(RANK)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        model.compile(optimizer, "mse", jit_compile=False)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "verbose": 0}
        own = [broadcast, *callbacks(folder, backup)]
        history = model.fit(x, x[:, :1], epochs=epochs, callbacks=own, **options)
        return model, history.epoch

    trained(2, True)
    # As scripts for Horovod do it: only the first rank has the callback.
    resumed, epochs = trained(4, backup=RANK == 0)
    whole, _ = trained(4, False)
    hvd.check_replicas(resumed)
    pairs = zip(resumed.get_weights(), whole.get_weights(), strict=True)
    alone = Path(tempfile.mkdtemp())
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse", jit_compile=False)
    plain.fit(x, x[:, :1], callbacks=callbacks(alone), verbose=0)
    hvd.allreduce(0.0, name="all have written")
    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "epochs": epochs,
        "gap": max(float(np.abs(a - b).max()) for a, b in pairs),
        "files of a plain model": len(list(alone.iterdir())),
    }


def case_first_rank_first() -> dict[str, Any]:
    """Rank 0 takes longer than Horovod's stall check allows; then it fails, which the other is told."""
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    mock.patch.object(first_rank, "NEWS_SECONDS", 1.0).start()
    limit = float(os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"])
    seconds = float(os.environ.get("SLEEP_SECONDS", limit + 5))
    with hvdtrain.first_rank_first():
        found = len(list(folder.iterdir()))
        if RANK == 0:
            time.sleep(seconds)
        (folder / str(RANK)).touch()
    # As the last save of a large checkpoint.
    assert first_rank.on_first(lambda: time.sleep(seconds) or RANK, "save") == 0  # type: ignore[func-returns-value]
    try:
        with hvdtrain.first_rank_first():
            if RANK == 0:
                raise OSError("no such host: data.example")
            found = -1
    except (OSError, hvdtrain.EngineError) as error:
        said = f"{type(error).__name__}: {error}"
    return {"found": found, "said": said}


def case_saved_while_gradients_wait() -> dict[str, Apart]:
    """Four steps in an epoch, an update at every third: from a backup, and from a model that rank 0 saves."""
    x = np.random.default_rng(0).normal(size=(16 * SIZE, 2)).astype("float32")
    y, own = x.sum(axis=1, keepdims=True), slice(RANK, None, SIZE)

    def fit(model: keras.Model, epochs: int, data: slice, batch: int, *callbacks: Any) -> None:
        options: dict[str, Any] = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
        model.fit(x[data], y[data], batch, epochs, **options)

    def made(wrap: Any = lambda optimizer: optimizer) -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.1, gradient_accumulation_steps=3)
        model.compile(wrap(optimizer), "mse", jit_compile=False)
        return model

    def alone() -> dict[str, Any]:
        model = made()
        fit(model, 2, slice(None), 4 * SIZE)
        return {"weights": weights(model)}

    wanted = reference(alone)
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    for epochs in (1, 2):
        backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
        resumed = made(hvd.DistributedOptimizer)
        fit(resumed, epochs, own, 4, backup)
    model = made(hvd.DistributedOptimizer)
    fit(model, 1, own, 4)
    if RANK == 0:
        model.save(folder / "model.keras")
    hvd.allreduce(0.0, name="saved")
    loaded = hvd.load_model(folder / "model.keras")
    fit(loaded, 1, own, 4)
    # As scripts for Horovod do it: the others have a new model.
    some = hvd.load_model(folder / "model.keras") if RANK == 0 else made(hvd.DistributedOptimizer)
    fit(some, 1, own, 4, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    return {
        "broadcast": wanted.apart(weights(some), "weights"),
        "backup": wanted.apart(weights(resumed), "weights"),
        "loaded": wanted.apart(weights(loaded), "weights"),
    }


def case_a_slow_writer() -> dict[str, Any]:
    return _slow_writer("epoch")


def case_a_slow_writer_within_an_epoch() -> dict[str, Any]:
    return _slow_writer(2)


def _slow_writer(save_freq: str | int) -> dict[str, Any]:
    """Rank 0 saves for longer than Horovod's stall check allows."""
    mock.patch.object(first_rank, "NEWS_SECONDS", 1.0).start()
    # Horovod begins to count when it has dropped the stalled collective from its cache.
    seconds = 2 * float(os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]) + 3

    class Slow(keras.callbacks.ModelCheckpoint):
        def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
            time.sleep(seconds)
            super()._save_model(epoch, batch, logs)

    file = Path(hvd.broadcast_object(tempfile.mkdtemp())) / "model.keras"
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Slow(file, save_freq=save_freq)]
    history = model.fit(np.ones([12, 2]), np.ones([12, 1]), 4, 1, 0, own)
    return {"epochs": history.epoch, "saved": file.is_file()}


def case_a_collective_on_one_rank() -> dict[str, str]:
    """In a writer, which only rank 0 runs, and in work that the others wait for."""

    class Averages(keras.callbacks.ModelCheckpoint):
        hook = "on_epoch_end"

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.hook == "on_train_batch_end":
                hvd.allreduce(0.0)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if self.hook == "on_epoch_end":
                hvd.allgather(np.zeros(1))

    found = {}
    for Averages.hook in ("on_train_batch_end", "on_epoch_end"):
        for given in ("to all", "to rank 0"):
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
            model.compile(optimizer, "mse", jit_compile=False)
            own: list[Any] = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
            if given == "to all" or hvd.rank() == 0:
                own.append(Averages("model.keras"))
            try:
                model.fit(np.ones([8, 2]), np.ones([8, 1]), 4, 1, 0, own)
            except hvdtrain.errors.HvdtrainError as error:
                found[f"{Averages.hook}, given {given}"] = str(error)
    try:
        with hvdtrain.first_rank_first():
            hvd.broadcast_object("news")
    except hvdtrain.errors.HvdtrainError as error:
        found["first_rank_first"] = str(error)
    return found


def case_nan_on_one_rank() -> dict[str, Any]:
    """One of 4 batches, of rank 1."""
    x = np.ones([8, 2], "float32")
    if RANK == 1:
        x[3] = np.nan
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    steps: list[int] = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs=None: steps.append(batch)
    )
    own = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.TerminateOnNaN(),
        count,
    ]
    history = model.fit(x, x[:, :1], 2, 3, 0, own, shuffle=False)
    return {"steps": steps, "epochs": history.epoch}


class Gan(keras.Model):
    """Two optimizers of its own; that of compile is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = keras.layers.Dense(1), keras.layers.Dense(1)
        self.optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in range(2)]

    def call(self, x: Any) -> Any:
        return self.one(x) + self.two(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for optimizer, layer in zip(self.optimizers, (self.one, self.two), strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_several_optimizers() -> dict[str, Any]:
    """The same files on all ranks, gone on from; then initial weights that were not broadcast."""
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    x = np.random.default_rng(RANK).normal(size=(8, 2)).astype("float32")
    epochs, message = [], ""
    for seed, end in ((0, 1), (RANK, 2), (RANK, 0)):
        keras.utils.set_random_seed(seed)
        model = Gan()
        model.compile(jit_compile=False)
        model(x)
        backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
        log = keras.callbacks.CSVLogger(folder / f"log-{RANK}.csv")
        own = [backup, log] if end else []
        try:
            history = model.fit(x, x[:, :1], 4, end or 1, 0, own)
            epochs.append(history.epoch)
        except hvdtrain.errors.ReplicaError as error:
            message = str(error)
    files = sorted(path.name for path in folder.iterdir())
    return {"files": files, "epochs": epochs, "message": message}
