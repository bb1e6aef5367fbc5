"""DistributedOptimizer against plain Keras with the whole batch."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from references import reference
from results import Apart
from small import (
    BATCH,
    CLASSES,
    IMAGES,
    LABELS,
    LOCAL_BATCH,
    RANK,
    SIZE,
    STEPS,
    crossentropy,
    difference,
    layers,
    one_process,
    optimizers,
    own_part,
    small_model,
    weights,
)

import hvdtrain.keras as hvd
from hvdtrain.collectives import reduction
from hvdtrain.errors import UsageError

SGD, Adam = optimizers.SGD, optimizers.Adam


def train(
    optimizer: Any, make: Callable[[], keras.Model] = small_model, **compiled: Any
) -> keras.Model:
    """Train on this rank's part; every rank must end with the same bits."""
    model = make()
    model.compile(optimizer, **{"loss": crossentropy(), "jit_compile": False} | compiled)
    model.fit(own_part(IMAGES), own_part(LABELS), batch_size=LOCAL_BATCH, shuffle=False, verbose=0)
    hvd.check_replicas(model)
    return model


def apart(
    make_optimizer: Callable[[], Any],
    reference: Callable[[], Any] | None = None,
    wrap: Callable[..., Any] = hvd.DistributedOptimizer,
    compiled: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Apart:
    """Largest difference of the weights between the ranks' training and one process's."""
    found = weights(train(wrap(make_optimizer(), **kwargs), **compiled or {}))
    return one_process(reference or make_optimizer).apart(found, "weights")


def momentum(rate: float = 0.1, **kwargs: Any) -> Any:
    return SGD(rate, momentum=0.9, **kwargs)


def case_optimizers() -> dict[str, Apart]:
    decay = optimizers.schedules.ExponentialDecay
    made = {
        "momentum": momentum,
        "nesterov": lambda: momentum(nesterov=True),
        "Adam": lambda: Adam(1e-2),
        "AdamW": lambda: optimizers.AdamW(1e-2, weight_decay=0.05),
        "Lamb": lambda: optimizers.Lamb(1e-2),
        "LARS": lambda: hvd.LARS(1.0, weight_decay=0.05, trust_coefficient=0.05),
        "clipnorm": lambda: momentum(clipnorm=0.1),
        "global_clipnorm": lambda: momentum(global_clipnorm=0.1),
        "clipvalue": lambda: momentum(clipvalue=0.01),
        "EMA": lambda: momentum(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
        "schedule": lambda: Adam(decay(1e-2, 2, 0.5)),
    }
    return {name: apart(make) for name, make in made.items()}


def case_subset() -> dict[str, Apart]:
    return {"momentum": apart(momentum), "Adam": apart(lambda: Adam(1e-2), groups=2)}


def case_ways_of_running() -> dict[str, Apart]:
    ways = {
        "run_eagerly": {"run_eagerly": True},
        "steps_per_execution": {"steps_per_execution": 4},
        "jit_compile": {"jit_compile": True},
    }
    return {name: apart(momentum, compiled=way) for name, way in ways.items()}


class Positions(layers.Layer):
    """Of words in a text, as on keras.io: looked up once for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = layers.Embedding(9, 3), layers.Embedding(5, 3)

    def call(self, words: Any) -> Any:
        return self.words(words) + self.places(keras.ops.arange(5))


def case_positions() -> dict[str, Apart]:
    """From arrays, in whole batches: a graph that knows their size. Then ranks whose last batches differ in size."""
    words = np.random.default_rng(0).integers(0, 9, (BATCH * STEPS, 5))

    def fit(optimizer: Any, x: Any, y: Any, batch: int, jit: bool = False) -> keras.Model:
        keras.utils.set_random_seed(3)
        flat = [layers.Flatten(), layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((5,)), Positions(), *flat])
        model.compile(optimizer, crossentropy(), jit_compile=jit)
        model.fit(x, y, batch, shuffle=False, verbose=0)
        return model

    found = {}
    makes = {"Adam": lambda: Adam(1e-2), "clipnorm": lambda: momentum(clipnorm=0.1)}
    for name, make in makes.items():
        wanted = reference(
            lambda make=make: {"weights": weights(fit(make(), words, LABELS, BATCH))}
        )
        for jit in (False, True):
            mine = (own_part(words), own_part(LABELS), LOCAL_BATCH)
            model = fit(hvd.DistributedOptimizer(make()), *mine, jit)
            found[f"{name}, jit {jit}"] = wanted.apart(weights(model), "weights")
    uneven = (own_part(words)[RANK > 0 :], own_part(LABELS)[RANK > 0 :], LOCAL_BATCH)
    hvd.check_replicas(fit(hvd.DistributedOptimizer(Adam(1e-2)), *uneven))
    return found


def case_arguments() -> dict[str, Apart]:
    def listed(optimizer: Any) -> Any:
        # Two groups by hand, and two variables in none.
        model.append(small_model())
        own = model[-1].trainable_variables
        return hvd.DistributedOptimizer(optimizer, groups=[[own[0], own[3]], [own[1], own[2]]])

    model: list[keras.Model] = []
    return {
        "groups": apart(momentum, groups=3),
        "groups, lists": one_process(momentum).apart(
            weights(train(listed(momentum()), lambda: model[-1])), "weights"
        ),
        "predivide": apart(momentum, gradient_predivide_factor=4.0),
        "sum": apart(lambda: momentum(0.1 / SIZE), momentum, op=hvd.Sum),
        "fp16": apart(momentum, compression=hvd.Compression.fp16),
        "bf16": apart(momentum, compression=hvd.Compression.bf16),
    }


def case_accumulation() -> dict[str, Apart]:
    def averaged() -> Any:
        return momentum(gradient_accumulation_steps=2)

    def summed() -> Any:
        return momentum(0.2, gradient_accumulation_steps=2)

    return {
        "Keras": apart(averaged),
        "average": apart(
            momentum, averaged, backward_passes_per_step=2, average_aggregated_gradients=True
        ),
        "sum": apart(momentum, summed, backward_passes_per_step=2),
        "run_eagerly": apart(averaged, compiled={"run_eagerly": True}),
    }


def case_accumulation_communicates_at_its_boundary() -> dict[str, int]:
    """Allreduces of STEPS eager steps, but for those in which fit asks whether a rank failed or may stop."""
    counted: dict[str, int] = {}
    for steps in (1, 3):
        with mock.patch.object(reduction.hvd, "allreduce", wraps=reduction.hvd.allreduce) as calls:
            optimizer = hvd.DistributedOptimizer(momentum(), backward_passes_per_step=steps)
            train(optimizer, run_eagerly=True)
            names = [call.kwargs.get("name") for call in calls.call_args_list]
            questions = ("hvdtrain_failure", "hvdtrain_stops")
            counted[str(steps)] = sum(name not in questions for name in names)
    return counted


def case_loss_scaling() -> dict[str, Apart]:
    scaled = optimizers.LossScaleOptimizer

    def outside(optimizer: Any) -> Any:
        return scaled(hvd.DistributedOptimizer(optimizer))

    def inside(optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(scaled(optimizer))

    return {
        "outside": apart(momentum, wrap=outside),
        "inside": apart(momentum, wrap=inside),
        "jit_compile": apart(momentum, wrap=inside, compiled={"jit_compile": True}),
    }


def case_inf_on_one_rank() -> dict[str, list[float]]:
    """The loss scale before and after an inf on the last rank, and how far the weights went."""
    found = {}
    for name in ("auto", "inside"):
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = small_model()
        finally:
            keras.config.set_dtype_policy("float32")
        optimizer = momentum(1e-3)
        if name == "inside":
            optimizer = optimizers.LossScaleOptimizer(optimizer)
        model.compile(hvd.DistributedOptimizer(optimizer), crossentropy(), jit_compile=False)
        assert isinstance(model.optimizer, optimizers.LossScaleOptimizer)
        x, y = own_part(IMAGES)[:LOCAL_BATCH], own_part(LABELS)[:LOCAL_BATCH]
        model.train_on_batch(x, y)
        scale, start = float(model.optimizer.dynamic_scale), weights(model)
        bad = np.full_like(x, np.inf) if RANK == SIZE - 1 else x
        model.train_on_batch(bad, y)
        skipped = difference(start, weights(model))
        model.train_on_batch(x, y)
        hvd.check_replicas(model)
        moved = difference(start, weights(model))
        found[name] = [float(model.optimizer.dynamic_scale) / scale, skipped, moved]
    return found


def case_local_layers() -> dict[str, float]:
    """The last layer's update on this rank against SGD by NumPy's account of its own gradient."""
    found = {}
    for scale in (True, False):
        model = small_model()
        last = model.layers[-1]
        optimizer = hvd.PartialDistributedOptimizer(
            SGD(0.1), local_layers=last, scale_local_gradients=scale
        )
        x, y = own_part(IMAGES)[:LOCAL_BATCH], own_part(LABELS)[:LOCAL_BATCH]
        with tf.GradientTape() as tape:
            loss = crossentropy()(y, model(x))
        gradient = tape.gradient(loss, last.kernel.value).numpy()
        start = last.kernel.numpy()
        model.compile(optimizer, crossentropy(), jit_compile=False)
        model.train_on_batch(x, y)
        hvd.check_replicas(model)  # leaves local variables out
        wanted = start - 0.1 * gradient / (SIZE if scale else 1)
        found[f"scale {scale}"] = difference([last.kernel.numpy()], [wanted])
        everyone = hvd.allgather(last.kernel[tf.newaxis]).numpy()
        found[f"ranks {scale}"] = difference([everyone[0]], [everyone[-1]])
    return found


def case_two_optimizers_in_one_function() -> float:
    """A generator and a discriminator that learn in turns, as in a GAN."""

    def play(distributed: bool, x: np.ndarray) -> list[np.ndarray]:
        keras.utils.set_random_seed(4)
        generator = keras.Sequential([layers.Input((3,)), layers.Dense(4)])
        critic = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        both = [momentum(0.05), Adam(0.01)]
        if distributed:
            both = [hvd.DistributedOptimizer(o) for o in both]

        @tf.function
        def step(batch: tf.Tensor) -> None:
            with tf.GradientTape(persistent=True) as tape:
                made = tf.tanh(generator(batch))
                judged = critic(made)
                lost = tf.reduce_mean(tf.square(judged - 1.0))
                won = -tf.reduce_mean(tf.square(judged))
            for model, target, optimizer in ((generator, lost, both[0]), (critic, won, both[1])):
                variables = [v.value for v in model.trainable_variables]
                optimizer.apply(tape.gradient(target, variables), model.trainable_variables)

        for batch in np.split(x, STEPS):
            step(tf.constant(batch))
        return weights(generator) + weights(critic)

    x = np.random.default_rng(5).normal(size=(BATCH * STEPS, 3)).astype("float32")
    return difference(play(True, own_part(x)), play(False, x))


def case_extra_objects_on_one_rank() -> Apart:
    """Layers, optimizers and tapes that only rank 0 makes must not shift any name."""
    if RANK == 0:
        for _ in range(3):
            layers.Dense(2)
            small_model()
            hvd.DistributedOptimizer(Adam())
            hvd.DistributedGradientTape(tf.GradientTape())
    return apart(momentum)


def case_constant_gradient() -> float:
    """A constant of the graph on rank 0 alone, which TensorFlow would reduce once and for all.

    The other ranks' gradients are 1, 2, 3 in three steps, rank 0's is 1.
    """
    w, count = keras.Variable(np.zeros(3, "float32")), tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(SGD(1.0))
    optimizer.build([w])

    @tf.function
    def step() -> None:
        number = count.assign_add(1.0)
        optimizer.apply([tf.ones(3) * (1.0 if RANK == 0 else number)], [w])

    for _ in range(3):
        step()
    return float(w.numpy()[0])


def case_stays_distributed() -> dict[str, Any]:
    """Copies of a distributed optimizer, and the second wrapping that must fail."""
    original = hvd.DistributedOptimizer(momentum(), groups=2)
    copies = {
        "from_config": type(original).from_config(original.get_config()),
        "deepcopy": copy.deepcopy(original),
    }
    found: dict[str, Any] = {
        name: one_process(momentum).apart(weights(train(optimizer)), "weights")
        for name, optimizer in copies.items()
    }
    try:
        hvd.DistributedOptimizer(original)
    except UsageError as error:
        found["wrapped twice"] = float("wrap it only once" in str(error))
    try:
        hvd.DistributedOptimizer(optimizers.LossScaleOptimizer(original))
    except UsageError as error:
        found["wrapped twice, scaled"] = float("wrap it only once" in str(error))
    found["isinstance"] = float(isinstance(original, SGD))
    return found


def case_saved() -> list[float]:
    """Save after two batches; return what the next plain step must give from there."""
    model = train(hvd.DistributedOptimizer(momentum()))
    path = Path(os.environ["FOLDER"]) / f"rank{RANK}.keras"
    model.save(path)
    return [float(np.sum(w, dtype="float64")) for w in weights(model)]


def case_process_set() -> dict[str, Any]:
    """Ranks 0 and 1 train together, rank 2 alone and plainly."""
    pair = hvd.add_process_set([0, 1])
    optimizer = momentum()
    if RANK < 2:
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=pair)
    model = small_model()
    model.compile(optimizer, crossentropy(), jit_compile=False)
    x, y = own_part(IMAGES), own_part(LABELS)
    model.fit(x, y, batch_size=LOCAL_BATCH, shuffle=False, verbose=0)
    whole = small_model()
    whole.compile(momentum(), crossentropy(), jit_compile=False)
    if RANK < 2:
        rows = np.arange(BATCH * STEPS).reshape(STEPS, BATCH)[:, : 2 * LOCAL_BATCH].reshape(-1)
        x, y = IMAGES[rows], LABELS[rows]
    whole.fit(x, y, batch_size=LOCAL_BATCH * (2 if RANK < 2 else 1), shuffle=False, verbose=0)
    return {"difference": difference(weights(model), weights(whole))}


def case_set_and_global() -> list[list[float]]:
    """Ranks 0 and 1 have an optimizer, a tape and an unnamed collective of their own before those of all ranks."""
    pair = hvd.add_process_set([0, 1])
    of_pair, of_all = (tf.Variable(np.zeros(3, "float32")) for _ in range(2))
    mine = tf.constant([1.0, 2.0, 4.0]) * (1 + RANK)
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair)
    second = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    first.apply([mine], [of_pair])
    second.apply([mine], [of_all])

    with hvd.DistributedGradientTape(tf.GradientTape(), process_set=pair) as tape:
        loss = tf.reduce_sum(of_pair * mine)
    taped_of_pair = tape.gradient(loss, [of_pair])[0]
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(of_all * mine)
    taped_of_all = tape.gradient(loss, [of_all])[0]

    @tf.function
    def reduced(x: tf.Tensor) -> tf.Tensor:
        if RANK < 2:
            x = hvd.allreduce(x, op=hvd.Sum, process_set=pair)
        return hvd.allreduce(x, op=hvd.Sum)

    found = (of_pair, of_all, taped_of_pair, taped_of_all, reduced(mine))
    return [np.asarray(one).tolist() for one in found]
