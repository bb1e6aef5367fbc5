"""Train what a case describes, by plain Keras in one process and by the Trainer on all ranks."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import keras
import numpy as np
from exactness import words
from exactness.case import Case
from exactness.data import arguments, arrays

import hvdtrain
from hvdtrain.errors import UsageError

EPOCHS = 2
VALIDATION = 11


def by_keras(case: Case) -> dict[str, Any]:
    """Return what plain Keras comes to: weights, history, answers, the weights it began with, its warnings."""
    keras.config.set_dtype_policy(case.policy)
    keras.utils.set_random_seed(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = _build(case, words.PLAIN)
        start = _weights(model) if model.built else []
        compiled = {"jit_compile": False} | _compiled(case)
        model.compile(words.optimizer(case.optimizer), **compiled)
        (x, y, weights), steps = arguments(case)
        fit = {"epochs": EPOCHS, "shuffle": False, "verbose": 0} | steps | _fit(case)
        if case.source in ("arrays", "frames"):
            fit["batch_size"] = case.batch
        if "validation_data" in fit:  # As the Trainer does; beside a Dataset Keras's own is 32.
            fit["validation_batch_size"] = case.batch
        history = model.fit(x, y, sample_weight=weights, **fit).history
        found = {"start": start, "weights": _weights(model), "history": _plain(history)}
        if case.answers:
            x, y, weights = _asked(case)
            found["evaluate"] = model.evaluate(
                x, y, sample_weight=weights, batch_size=case.batch, verbose=0, return_dict=True
            )
            found["predict"] = _flat(model.predict(x, batch_size=case.batch, verbose=0))
    return found | {"warnings": _texts(told)}


def by_trainer(case: Case) -> dict[str, Any]:
    """Return the same of the Trainer on these ranks, or {"refused": why}."""
    keras.config.set_dtype_policy(case.policy)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = _by_trainer(case)
        except UsageError as error:
            return {"refused": str(error)}
    return found | {"warnings": _texts(told)}


def _by_trainer(case: Case) -> dict[str, Any]:
    trainer = hvdtrain.Trainer(
        lambda: _build(case, words.DISTRIBUTED),
        words.optimizer(case.optimizer),
        **_compiled(case),
        global_batch_size=case.batch,
        seed=1,
    )
    data, steps = arguments(case)
    fit = {"epochs": EPOCHS, "shuffle": False, "verbose": 0} | steps | _fit(case)
    history = trainer.fit(*data, **fit).history
    found = {"weights": _weights(trainer.model), "history": _plain(history)}
    if case.answers:
        asked = _asked(case)
        found["evaluate"] = trainer.evaluate(*asked, verbose=0, return_dict=True)
        found["predict"] = _flat(trainer.predict(asked[0], verbose=0))
    return found


def _build(case: Case, ours: Any) -> keras.Model:
    return words.build(case.model, _inputs(case), case.layers, ours)


def _inputs(case: Case) -> Any:
    """Symbolic inputs, by the first examples."""

    def one(array: np.ndarray, name: str) -> Any:
        dtype = "string" if array.dtype.kind == "O" else array.dtype.name
        return keras.Input(array.shape[1:], dtype=dtype, name=name)

    x = arrays(case.x)
    if isinstance(x, dict):
        return {name: one(array, name) for name, array in x.items()}
    return one(x, "x")


def _compiled(case: Case) -> dict[str, Any]:
    given = {name: words.argument(text) for name, text in case.compiled.items()}
    return {"loss": words.loss(case.loss), "metrics": words.metrics(case.metrics)} | given


def _fit(case: Case) -> dict[str, Any]:
    given = {name: words.argument(text) for name, text in case.fit.items()}
    if given.get("validation_data") is True:
        kinds = [case.x, case.y, case.weights]
        given["validation_data"] = tuple(arrays(k, VALIDATION) for k in kinds if k)
    return given


def _asked(case: Case) -> tuple:
    return tuple(arrays(kind, case.examples) for kind in (case.x, case.y, case.weights))


def _weights(model: keras.Model) -> list[np.ndarray]:
    """Weights, statistics and counters; not the states of random generators, which are each rank's own."""
    return [v.numpy() for v in model.weights if "seed_generator" not in v.path]


def _plain(history: dict[str, Any]) -> dict[str, Any]:
    return {name: [np.asarray(v, "float64") for v in values] for name, values in history.items()}


def _flat(outputs: Any) -> list[np.ndarray]:
    return [np.asarray(one) for one in keras.tree.flatten(outputs)]


def _texts(told: list[warnings.WarningMessage]) -> list[str]:
    return [inspect.cleandoc(str(one.message)) for one in told]
