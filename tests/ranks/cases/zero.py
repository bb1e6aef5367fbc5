"""ShardedOptimizer against the plain optimizer in one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.tensorflow as engine
import keras
import numpy as np
import tensorflow as tf
from against_keras import BATCH, WEIGHT, Y, inputs, mixed_model, plain
from references import reference
from results import Apart
from small import RANK, SIZE, crossentropy, difference, optimizers, weights

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.errors import UsageError
from hvdtrain.parallel.state_layout import optimizer_pieces
from hvdtrain.parallel.zero import ShardedOptimizer
from hvdtrain.parallel.zero import sharded_optimizer as sharding

# The weights of these small models, too, arrive in several groups.
mock.patch.object(sharding, "GATHERED_BYTES", 90).start()
STEPS = 30
SHORT = range(8)
"""Steps in which every third (accumulation) and fourth (averages) came twice, and the 5th (schedule) is past."""
# The parts of (1,) are empty on all ranks but one; 7 x 3 and 5 divide unevenly.
SHAPES = {"kernel": (7, 3), "bias": (5,), "gamma": (1,), "table": (6, 2)}
RNG = np.random.default_rng(1)
START = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}
TARGETS = {name: RNG.normal(size=(SIZE, STEPS, *shape)) for name, shape in SHAPES.items()}
SGD, Adam = optimizers.SGD, optimizers.Adam


def momentum(rate: float = 0.05, **kwargs: Any) -> Any:
    return SGD(rate, momentum=0.9, **kwargs)


def variables(dtype: str = "float32") -> list[Any]:
    return [keras.Variable(v.astype("float32"), dtype=dtype, name=n) for n, v in START.items()]


def play(
    optimizer: Any,
    mine: bool,
    trained: list[Any] | None = None,
    steps: range = range(STEPS),
    eager: bool = False,
    sparse: bool = True,
) -> list[np.ndarray]:
    """Minimise (w - target)^2 / 2; `mine`: this rank's targets, else the mean over the ranks, and return w."""
    trained = trained or variables()
    targets = {n: t[RANK] if mine else t.mean(axis=0) for n, t in TARGETS.items()}
    tables = [RANK] if mine else range(SIZE)
    if not optimizer.built:
        optimizer.build(trained)

    def slices(goals: tf.Tensor, indices: tf.Tensor) -> tf.IndexedSlices:
        """The gradient of the table, of all ranks it is for: every row once, its first one in two pieces."""
        rows = [
            trained[-1].value - tf.cast(goal, trained[-1].value.dtype) for goal in tf.unstack(goals)
        ]
        pieces = [part for row in rows for part in (row[:1] / 4, row[1:], row[:1] * 3 / 4)]
        return tf.IndexedSlices(tf.concat(pieces, axis=0) / len(rows), indices, (6, 2))

    def step(goals: list[tf.Tensor], table_goals: tf.Tensor, indices: tf.Tensor) -> None:
        gradients: list[Any] = [
            v.value - tf.cast(goal, v.value.dtype) for v, goal in zip(trained, goals, strict=True)
        ]
        if sparse:
            # One process has the slices of all ranks: Keras squares and clips each of them by itself.
            gradients[-1] = slices(table_goals, indices)
        if isinstance(optimizer, optimizers.LossScaleOptimizer):
            scale = tf.convert_to_tensor(optimizer.dynamic_scale)
            gradients = [g * tf.cast(scale, g.dtype) for g in map(tf.convert_to_tensor, gradients)]
        optimizer.apply(gradients, trained)

    run = step if eager else tf.function(step)
    for number in steps:
        table = np.stack([TARGETS["table"][rank, number] for rank in tables])
        run(
            [tf.constant(targets[n][number], tf.float32) for n in SHAPES],
            tf.constant(table, tf.float32),
            tf.constant([0, *range(1, 6), 0] * len(tables)),  # An argument, as they stand for data.
        )
    optimizer.finalize_variable_values(trained)
    return [keras.ops.convert_to_numpy(keras.ops.cast(v, "float32")) for v in trained]


def far(
    make: Callable[[], Any],
    wrap: Callable[..., Any] = ShardedOptimizer,
    steps: range = range(STEPS),
    eager: bool = False,
) -> Apart:
    found = play(wrap(make()), True, steps=steps, eager=eager)
    require_same(found)
    # Eagerly: that is faster than to trace 30 steps' worth of small operations.
    wanted = reference(lambda: {"weights": play(make(), False, steps=steps, eager=True)})
    return wanted.apart(found, "weights")


def require_same(found: list[np.ndarray]) -> None:
    """Stop unless all ranks hold the same, to the last bit."""
    everyone = engine.allgather(np.concatenate([w.ravel() for w in found])[np.newaxis]).numpy()
    assert (everyone == everyone[0]).all()


def without_bias() -> Any:
    optimizer = optimizers.AdamW(1e-2, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma"])
    return optimizer


def case_optimizers() -> dict[str, Apart]:
    decay = optimizers.schedules.ExponentialDecay
    made = {
        "momentum": momentum,
        "nesterov": lambda: momentum(nesterov=True, weight_decay=0.1),
        "Adam": lambda: Adam(1e-2, amsgrad=True),
        "AdamW, exclusions": without_bias,
        "clipnorm": lambda: momentum(clipnorm=0.5),
        "global_clipnorm": lambda: Adam(1e-2, global_clipnorm=0.7),
        "clipvalue": lambda: momentum(clipvalue=0.3),
        "EMA": lambda: momentum(use_ema=True, ema_momentum=0.8),
        "EMA, overwriting": lambda: Adam(1e-2, use_ema=True, ema_overwrite_frequency=4),
        "accumulation": lambda: momentum(gradient_accumulation_steps=3, global_clipnorm=1.0),
        "schedule": lambda: Adam(decay(1e-2, 5, 0.5)),
        "loss scaling": lambda: optimizers.LossScaleOptimizer(momentum(), initial_scale=4.0),
    }
    others = {
        "RMSprop": lambda: optimizers.RMSprop(1e-2, momentum=0.5, centered=True),
        "Nadam": lambda: optimizers.Nadam(1e-2),
        "Lion": lambda: optimizers.Lion(1e-3),
        "Adagrad": lambda: optimizers.Adagrad(1e-2),
        "Adadelta": lambda: optimizers.Adadelta(0.5),
        "Adamax": lambda: optimizers.Adamax(1e-2),
        "Ftrl": lambda: optimizers.Ftrl(1e-2, l1_regularization_strength=0.01),
    }
    traced = ("Adam", "EMA, overwriting", "accumulation", "loss scaling")
    long = ("momentum", "Adam")
    found = {
        name: far(make, steps=range(STEPS) if name in long else SHORT, eager=name not in traced)
        for name, make in made.items()
    }
    # Few steps: they share all but their own formula with those above.
    return found | {name: far(make, steps=range(3), eager=True) for name, make in others.items()}


def case_few() -> dict[str, Apart]:
    return {
        "AdamW, exclusions": far(without_bias, eager=True),
        "EMA, clipnorm": far(lambda: momentum(use_ema=True, clipnorm=0.5), steps=SHORT),
    }


def case_ways() -> dict[str, Apart]:
    def inside(optimizer: Any) -> Any:
        return optimizers.LossScaleOptimizer(ShardedOptimizer(optimizer), initial_scale=8.0)

    return {
        "eager accumulation": far(
            lambda: Adam(1e-2, gradient_accumulation_steps=3), steps=SHORT, eager=True
        ),
        "inside loss scaling": far(momentum, inside, SHORT),
    }


def case_dtypes() -> dict[str, Apart]:
    """Other types: as far from float32 as the plain optimizer of that type, and equal on all ranks."""
    found = {}
    wanted = reference(lambda: {"weights": play(momentum(), False, steps=SHORT, eager=True)})
    for dtype in ("float16", "bfloat16", "float64"):
        eager = dtype != "bfloat16"
        sharded = play(ShardedOptimizer(momentum()), True, variables(dtype), SHORT, eager)
        found[dtype] = wanted.apart(sharded, "weights")
    return found


def names_of(optimizer: Any) -> list[str]:
    """Names in the state; by place for variables that Keras numbers, as they have no name of their own."""
    names = [piece.name for piece in optimizer_pieces(optimizer)]
    return [n if n.startswith("optimizer/") else f"variable_{i}" for i, n in enumerate(names)]


def state_of(optimizer: Any) -> list[np.ndarray]:
    """The state as whole arrays. A collective."""
    return [piece.read() for piece in optimizer_pieces(optimizer)]


def case_state_size() -> dict[str, Any]:
    """Elements of Adam's state on this rank, of how many; what is not divided."""
    optimizer = ShardedOptimizer(Adam())
    optimizer.build(variables())
    plain = Adam()
    plain.build(variables())
    sizes = [int(np.prod(v.shape)) for v in optimizer.variables if len(v.shape)]
    play(optimizer, True, optimizer._trainable_variables, range(2))
    return {
        "mine": sum(sizes),
        "whole": sum(int(np.prod(v.shape)) for v in plain.variables if len(v.shape)),
        "largest": sum(2 * -(-int(np.prod(s)) // SIZE) for s in SHAPES.values()),
        "held between steps": sum(int(tf.size(p)) for p in optimizer.hvdtrain_parts.values()),
        "names": names_of(optimizer) == names_of(plain),
        "is Adam": isinstance(optimizer, Adam) and type(optimizer).__name__ == "Adam",
    }


def case_state_moves() -> dict[str, float]:
    """8 steps, state gathered, 4 more: sharded, in a plain optimizer, and in a plain one wrapped then."""
    rest = range(SHORT.stop, SHORT.stop + 4)
    made = {
        "EMA, Nadam": lambda: optimizers.Nadam(1e-2, use_ema=True),
        "loss scaling": lambda: optimizers.LossScaleOptimizer(Adam(1e-2), initial_scale=4.0),
        "accumulation": lambda: momentum(gradient_accumulation_steps=3),
    }
    found = {}
    for name, make in made.items():
        wanted_variables, plain = variables(), make()
        play(plain, False, wanted_variables, SHORT, eager=True)
        wanted = state_of(plain)
        trained, sharded = variables(), ShardedOptimizer(make())
        play(sharded, True, trained, SHORT, eager=True)
        state = state_of(sharded)
        assert names_of(sharded) == names_of(plain), (names_of(sharded), names_of(plain))
        found[name] = difference(state, wanted)
        end = play(plain, False, wanted_variables, rest, eager=True)
        for way in ("scattered", "wrapped", "plain"):
            again = [keras.Variable(v, name=v.name) for v in trained]
            optimizer = make() if way != "scattered" else ShardedOptimizer(make())
            optimizer.build(again)
            for piece, value in zip(optimizer_pieces(optimizer), state, strict=True):
                piece.write(value)
            if way == "wrapped":
                optimizer = ShardedOptimizer(optimizer)
            moved = play(optimizer, way != "plain", again, rest, eager=True)
            found[f"{name}, {way}"] = difference(moved, end)
    return found


def case_inf_on_one_rank() -> list[float]:
    """The loss scale's change after an inf on the last rank, and how far the weights went."""
    optimizer = ShardedOptimizer(optimizers.LossScaleOptimizer(momentum(), initial_scale=4.0))
    trained = variables()
    optimizer.build(trained)
    before = [v.numpy() for v in trained]
    wrong = np.inf if RANK == SIZE - 1 else 1.0
    tf.function(
        lambda: optimizer.apply([tf.ones_like(v.value) * wrong for v in trained], trained)
    )()
    return [float(optimizer.dynamic_scale) / 4.0, difference(before, [v.numpy() for v in trained])]


def case_local_variable() -> dict[str, float]:
    """The table is this rank's own: its gradient is divided by the ranks, as DistributedOptimizer does."""

    def own(wrap: Callable[..., Any]) -> list[np.ndarray]:
        trained, optimizer = variables(), wrap(Adam(1e-2))
        optimizer.register_local_var(trained[-1])
        return play(optimizer, True, trained, SHORT, eager=True, sparse=False)

    sharded, distributed = own(ShardedOptimizer), own(hvd.DistributedOptimizer)
    everyone = engine.allgather(sharded[-1][np.newaxis]).numpy()
    return {
        "apart": difference(sharded, distributed),
        "ranks": difference(everyone[0], everyone[-1]),
    }


def complaint(function: Callable[[], Any]) -> str:
    try:
        function()
    except UsageError as error:
        return str(error)
    return ""


def case_errors() -> dict[str, str]:
    class Mine(Adam):
        pass

    class Sworn(Mine):
        hvdtrain_elementwise = True

    sharded = ShardedOptimizer(Adam())
    sharded.build(variables())
    model = mixed_model()
    model.compile(ShardedOptimizer(Adam()), "mse")
    model.optimizer.build(model.trainable_variables)
    folder = Path(os.environ["FOLDER"])
    return {
        **{
            n: complaint(lambda n=n: ShardedOptimizer(getattr(optimizers, n)()))
            for n in ("Lamb", "Muon", "Adafactor")
        },
        "Mine": complaint(lambda: ShardedOptimizer(Mine())),
        "Sworn": complaint(lambda: ShardedOptimizer(Sworn())),
        "twice": complaint(lambda: ShardedOptimizer(sharded)),
        "distributed": complaint(lambda: ShardedOptimizer(hvd.DistributedOptimizer(Adam()))),
        "save": complaint(lambda: model.save(folder / f"one{RANK}.keras")),
        "h5": complaint(lambda: model.save(folder / f"one{RANK}.h5")),
        "local": complaint(lambda: sharded.register_local_var(variables()[0])),
    }


def regularized() -> keras.Model:
    return mixed_model(penalties=True)


def case_trainer() -> dict[str, dict[str, Apart]]:
    """Trainer on uneven batches: the last of 6 has one example, and all ranks but one are idle."""
    adam = {"global_clipnorm": 0.5, "use_ema": True, "ema_momentum": 0.9}
    return {
        "Adam": trained(lambda: Adam(1e-2, **adam), epochs=5, jit_compile=True),
        "accumulation": trained(
            lambda: momentum(gradient_accumulation_steps=2), epochs=1, run_eagerly=True
        ),
    }


def trained(make: Callable[[], Any], epochs: int, **arguments: Any) -> dict[str, Apart]:
    """How far a Trainer is from plain Keras."""
    trainer = hvdtrain.Trainer(
        regularized,
        make(),
        crossentropy(),
        global_batch_size=BATCH,
        seed=1,
        shard_optimizer=True,
        **arguments,
    )
    fit = {"epochs": epochs, "shuffle": False, "verbose": 0}
    history = trainer.fit(inputs(), Y, WEIGHT, **fit).history
    found = weights(trainer.model)
    require_same(found)
    wanted = plain(regularized, make(), (inputs(), Y, WEIGHT), fit)
    return {
        "weights": wanted.apart(found, "weights"),
        "history": wanted.apart(history, "history", "relative"),
    }


class Reader(keras.callbacks.Callback):
    """Loads a file at the beginning of the training, on rank 0 alone."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_begin(self, logs: Any = None) -> None:
        if RANK == 0:
            self.model.load_weights(self.path)


def case_trainer_saves() -> dict[str, Any]:
    """What Trainer.fit leaves in run_dir, and Trainer.save in a file, for plain Keras to go on with."""
    folder = Path(os.environ["FOLDER"]) / "run"

    def make(seed: int, **kwargs: Any) -> hvdtrain.Trainer:
        # After 30 steps the gradients of two wait for an update.
        optimizer = optimizers.AdamW(1e-2, weight_decay=0.1, gradient_accumulation_steps=4)
        arguments = {"global_batch_size": 16, "seed": seed, "shard_optimizer": True}
        return hvdtrain.Trainer(mixed_model, optimizer, crossentropy(), **arguments, **kwargs)

    trainer = make(1, run_dir=folder)
    begin = {f"begin{i}": w for i, w in enumerate(weights(trainer.model))}
    if RANK == 0:
        np.savez(folder.parent / "data.npz", y=Y, **inputs(), **begin)
    trainer.fit((inputs(), Y), epochs=5, shuffle=False, verbose=0)
    trainer.save(folder / "again.keras")
    if RANK == 0:
        shutil.copy(folder / "model.keras", folder / "first.keras")
    found = weights(trainer.model)
    # Rank 0's copy of the file counts, also where a callback of rank 0 alone read it.
    again = {}
    for way in ("load", "callback"):
        other = make(2)
        reader = Reader(str(folder / "again.keras"))
        if way == "load":
            other.load(folder / "again.keras")
        other.fit(
            (inputs(), Y),
            epochs=1,
            shuffle=False,
            verbose=0,
            callbacks=[reader] if way == "callback" else [],
        )
        again[way] = weights(other.model)
    trainer.fit((inputs(), Y), epochs=1, shuffle=False, verbose=0)
    return {
        "weights": [float(np.sum(w, dtype="float64")) for w in found],
        "moved": difference(found, weights(trainer.model)),
        **{way: difference(w, weights(trainer.model)) for way, w in again.items()},
    }


def case_loss_scaling_goes_on() -> float:
    """How far a Trainer that loads is from the one that saved, after another epoch of both."""
    file = Path(os.environ["FOLDER"]) / "scaled.keras"

    def make(seed: int) -> hvdtrain.Trainer:
        optimizer = optimizers.LossScaleOptimizer(Adam(1e-2), initial_scale=4.0)
        arguments = {"global_batch_size": 16, "seed": seed, "shard_optimizer": True}
        return hvdtrain.Trainer(mixed_model, optimizer, crossentropy(), **arguments)

    saved, loaded = make(1), make(2)
    fit = {"shuffle": False, "verbose": 0}
    saved.fit(inputs(), Y, **fit)
    saved.save(file)
    loaded.load(file)
    for each in (saved, loaded):
        each.fit(inputs(), Y, **fit)
    return difference(weights(saved.model), weights(loaded.model))
