"""Losses divided by masks and weights over micro-batches: stages in threads against plain Keras. No ranks."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from thread_ranks import thread_ranks

from hvdtrain.collectives.step_context import current_step
from hvdtrain.data import Share
from hvdtrain.keras_internals import graph as graph_internals
from hvdtrain.keras_internals.compiled_losses import build_compiled, drop_compiled
from hvdtrain.keras_internals.models import metric_names
from hvdtrain.parallel.pipeline.normalized_losses import are_late
from hvdtrain.parallel.pipeline.stage_messages import Exchange
from hvdtrain.parallel.pipeline.stage_steps import LastStageMetrics, PipelineSteps
from hvdtrain.parallel.pipeline.stages import cut

BEGINS = ("up", "tags")
"""Three stages; that in the middle has a penalty, and passes the padding's mask on."""
BATCHES = ((0, 11), (11, 22), (22, 24))
"""Three micro-batches of 3 or 4 examples, and in the end two of one."""
RNG = np.random.default_rng(2)
LENGTHS = np.arange(24) % 11 // 2
LENGTHS[-1] = 4
WORDS = np.where(np.arange(5) < LENGTHS[:, None], RNG.integers(1, 9, (24, 5)), 0)
LABELS = {"tags": RNG.integers(0, 4, (24, 5)), "flag": RNG.normal(size=(24, 1)).astype("float32")}
WEIGHT = {
    "tags": RNG.uniform(0.1, 4, (24, 5)).astype("float32"),
    "flag": RNG.uniform(0.2, 2, 24).astype("float32"),
}


def tagger(padded: bool) -> keras.Model:
    keras.utils.set_random_seed(1)
    l2 = keras.regularizers.L2(0.01)
    words = layers.Input((5,), dtype="int32")
    x = layers.Embedding(9, 6, mask_zero=padded, name="embedding")(words)
    x = layers.Dense(6, activation="tanh", kernel_regularizer=l2, name="up")(x)
    tags = layers.Dense(4, kernel_regularizer=l2, activity_regularizer=l2, name="tags")(x)
    flag = layers.Dense(1, name="flag")(layers.Flatten(name="flat")(x))
    return keras.Model(words, {"tags": tags, "flag": flag})


def compiled(padded: bool) -> dict[str, Any]:
    # What the two count must not be mixed up. Without padding it is the loss itself that leaves entries out.
    way = {"reduction": "mean_with_sample_weight"} if padded else {}
    ignore = None if padded else 0
    tags = keras.losses.SparseCategoricalCrossentropy(True, ignore_class=ignore, **way)
    return {
        "loss": {"tags": tags, "flag": keras.losses.MeanSquaredError(**way)},
        "loss_weights": {"tags": 1.0, "flag": 0.5},
        "weighted_metrics": {"tags": ["accuracy"], "flag": ["mae"]},
    }


class Queues:
    """Messages between threads."""

    def __init__(self, rank: int, queues: Any) -> None:
        self._rank, self._queues = rank, queues

    def send(self, rank: int, arrays: Sequence[np.ndarray]) -> None:
        self._queues[self._rank, rank].put(list(arrays))

    def receive(self, rank: int, specs: Sequence[Any], what: str) -> list[np.ndarray]:
        arrays = self._queues[rank, self._rank].get(timeout=30)
        assert [a.shape for a in arrays] == [s.shape for s in specs], what
        return arrays

    def flush(self) -> None:
        pass


class Weighing(keras.optimizers.SGD):
    """Weighs losses, as a distributed optimizer alone."""

    def scale_loss(self, loss: Any) -> Any:
        step = current_step()
        assert step is not None
        return super().scale_loss(step.weigh_loss(loss))


def make_steps(index: int, queues: Any, padded: bool) -> tuple[keras.Model, PipelineSteps]:
    whole = tagger(padded)
    stage = cut(whole, index, 3, BEGINS)
    (alone,) = thread_ranks(1)
    optimizer = Weighing(0.1, momentum=0.9)
    options = compiled(padded) if stage.is_last else {}
    stage.model.compile(optimizer, jit_compile=False, **options)
    optimizer.build(stage.model.trainable_variables)
    names = ("loss", "flag_loss", "tags_loss", "flag_mae", "tags_accuracy")
    if stage.is_last:
        symbolic = graph_internals.like_outputs(stage.whole, stage.whole.outputs)
        labels, weight = (
            {key: keras.KerasTensor((None, *v.shape[1:]), str(v.dtype)) for key, v in given.items()}
            for given in (LABELS, WEIGHT)
        )
        batch = (symbolic, labels, weight)
        build_compiled(stage.model, *batch)
        assert are_late(stage.model, stage.whole.outputs, batch)
        assert sorted(metric_names(stage.model)) == sorted(names)
    else:
        drop_compiled(stage.model)
    exchange = Exchange(stage, (0, 1, 2), Queues(index, queues))
    return stage.model, PipelineSteps(stage, exchange, alone, 3, LastStageMetrics(names, late=True))


def shares() -> list[Share]:
    return [
        Share(
            tf.nest.map_structure(lambda a, b=b, e=e: a[b:e], (WORDS, LABELS, WEIGHT)),
            e - b,
            e - b,
            0,
            0,
        )
        for b, e in BATCHES
    ]


def logs_of(models: Sequence[keras.Model]) -> dict[str, float]:
    *others, last = (model.get_metrics_result() for model in models)
    penalties = sum(float(logs["loss"]) for logs in others)
    return {k: float(v) + (penalties if k == "loss" else 0.0) for k, v in last.items()}


def together(run: Callable[[PipelineSteps], Any], steps: Sequence[PipelineSteps]) -> list[Any]:
    with ThreadPoolExecutor(len(steps)) as threads:
        return [future.result() for future in [threads.submit(run, one) for one in steps]]


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
def test_three_stages_are_one_model(padded: bool) -> None:
    plain = tagger(padded)
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=True, **compiled(padded))
    queues: Any = defaultdict(queue.Queue)
    models, steps = zip(*(make_steps(index, queues, padded) for index in range(3)), strict=True)
    for share in shares():
        wanted = plain.train_on_batch(*share.data, return_dict=True)
        told, *_ = together(lambda one, share=share: one.train([share]), steps)
        # What a callback sees after each step, and what an epoch's logs are made of.
        for found in (told, logs_of(models)):
            assert found.keys() == wanted.keys()
            np.testing.assert_allclose([found[k] for k in wanted], list(wanted.values()), 1e-5)
        plain.reset_metrics()
        for model in models:
            model.reset_metrics()
    own = {v.path: v.numpy() for model in models for v in model.trainable_variables}
    for variable in plain.trainable_variables:
        np.testing.assert_allclose(own[variable.path], variable.numpy(), rtol=0, atol=1e-6)
    for share in shares():
        wanted = plain.test_on_batch(*share.data, return_dict=True)
        together(lambda one, share=share: one.test(share), steps)
        found = logs_of(models)
        np.testing.assert_allclose([found[k] for k in wanted], list(wanted.values()), 1e-5)
        plain.reset_metrics()
        for model in models:
            model.reset_metrics()


def test_a_plain_mean_need_not_wait() -> None:
    model = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "mse")
    batch = (model.outputs[0], keras.KerasTensor((None, 2)), None)
    build_compiled(model, *batch)
    assert not are_late(model, model.outputs, batch)
