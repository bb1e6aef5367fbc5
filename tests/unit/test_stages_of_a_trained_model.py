"""Stages of a model that arrives compiled and with optimizer state: each keeps the state of its own weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from thread_ranks import thread_ranks

from hvdtrain.collectives.mesh import Mesh
from hvdtrain.keras_internals.optimizers import inner_of
from hvdtrain.parallel.gather_scatter import State, facts, merged, whole_of
from hvdtrain.parallel.layout import Layout
from hvdtrain.parallel.pipeline.stage_runner import StageRunner
from hvdtrain.parallel.state_layout import Sender, pieces_of
from hvdtrain.parallel.whole_file import whole_variables

X = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")


def trained(optimizer: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    sizes = {"first": 40, "second": 32, "third": 2}
    dense = [layers.Dense(size, name=name) for name, size in sizes.items()]
    model = keras.Sequential([keras.Input((4,)), *dense], name="whole")
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    model.fit(X, X[:, :2], epochs=2, shuffle=False, verbose=0)
    return model


def stages(
    make: Any, tensor: int = 1, as_function: bool = False, **split: str
) -> list[keras.Model]:
    """The models of all ranks of two stages, made one after the other; no rank talks to another."""
    mesh = Mesh(1, tensor=tensor, pipeline=2)
    layout = Layout(mesh, split, stages=["second"])
    models = []
    for stage in range(2):
        for group in thread_ranks(tensor):
            here = SimpleNamespace(mesh=mesh, stage=stage, tensor_set=group)
            models.append(StageRunner(layout, here).build(make if as_function else make()))
    return models


def state_of(models: list[keras.Model], tensor: int = 1) -> State:
    """The whole state, as `gather` joins it."""
    pieces = [
        pieces_of(whole_variables(model), model.optimizer, Sender(n % tensor == 0, common=n == 0))
        for n, model in enumerate(models)
    ]
    own = [{piece.place: piece for piece in one} for one in pieces]
    return {
        entry.name: whole_of([own[n][entry.place].read() for n, _ in entry.senders], entry)
        for entry in merged([facts(one) for one in pieces])
    }


OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.1, amsgrad=True),
    "average": lambda: optimizers.SGD(
        0.1, momentum=0.9, use_ema=True, gradient_accumulation_steps=3
    ),
    "schedule": lambda: optimizers.AdamW(optimizers.schedules.CosineDecay(0.1, 9)),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stages_keep_the_state_of_their_own_weights(name: str) -> None:
    whole = trained(OPTIMIZERS[name]())
    before = state_of([whole])
    models = stages(lambda: trained(OPTIMIZERS[name]()))
    found = state_of(models)
    assert list(found) == list(before)
    for path, value in before.items():
        np.testing.assert_array_equal(found[path], value, path)
    for model in models:
        assert len(inner_of(model.optimizer)._trainable_variables) == len(model.trainable_variables)


def name_of(variable: Any) -> str:
    """Path without the model's name, which a loaded model does not have in it."""
    return "/".join(variable.path.split("/")[-2:])


@pytest.mark.parametrize("as_function", [False, True])
def test_stages_train_on_as_the_whole_model_does(tmp_path: Any, as_function: bool) -> None:
    path = tmp_path / "trained.keras"
    whole = trained(optimizers.Adam(0.1))
    whole.save(path)
    models = stages(lambda: keras.models.load_model(path), as_function=as_function)
    gradients = {name_of(v): np.full(v.shape, 0.1, "float32") for v in whole.trainable_variables}
    for model in (whole, *models):
        variables = model.trainable_variables
        model.optimizer.apply([gradients[name_of(v)] for v in variables], variables)
    after = {name_of(v): v.numpy() for v in whole.trainable_variables}
    for model in models:
        for variable in model.trainable_variables:
            np.testing.assert_array_equal(variable.numpy(), after[name_of(variable)])


def test_the_state_of_layers_that_are_split_within_a_stage_is_split() -> None:
    before = state_of([trained(optimizers.Adam(0.1))])
    models = stages(lambda: trained(optimizers.Adam(0.1)), 2, first="column", second="column")
    found = state_of(models, 2)
    for path, value in before.items():
        np.testing.assert_array_equal(found[path], value, path)
