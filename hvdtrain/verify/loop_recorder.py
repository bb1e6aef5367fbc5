"""Notes the state after each step of model.fit and of loops of a script's own. Each rank holds all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.errors import UsageError
from hvdtrain.keras import is_initialized
from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.keras_internals.variables import (
    local_variables,
    optimizer_variables,
    replicated_variables,
    tf_variable,
    trained_variables,
    unique,
    without,
)
from hvdtrain.verify.model_facts import facts_of
from hvdtrain.verify.recording import (
    GRADIENT_OF,
    RecordedStep,
    write_facts,
    write_replicas,
    write_step,
)
from hvdtrain.verify.step_recorder import EnoughSteps, Recorder

ROUNDING = 1e-7
"""Rounding of a sum, relative to the largest value of a gradient: that of float32."""


@contextlib.contextmanager
def recorded_loops(recorder: Recorder) -> Iterator[None]:
    """Record each step of model.fit, and each `apply` of an optimizer outside of it and of a Trainer, in this block.

    Raises:
        EnoughSteps: The last step was recorded; from fit, from the `tf.function` that holds the step, or from `apply`.
    """
    fits = _Fits(recorder)
    callbacks = keras.callbacks.CallbackList
    with (
        # After the callbacks, one of which may give all ranks the weights of one.
        _followed(callbacks, "on_train_begin", after=fits.begin),
        _followed(callbacks, "on_train_batch_end", after=fits.note),
        _followed(callbacks, "on_train_end", after=fits.end),
        _followed(Function, "__call__", after=lambda *_, **__: _end_if_enough(recorder)),
        _followed(keras.Model, "__call__", after=lambda model, *_, **__: _know(recorder, model)),
        mock.patch.object(BaseOptimizer, "apply", _noting(BaseOptimizer.apply, recorder)),
    ):
        yield


class _Fits:
    """What a CallbackList tells of model.fit."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begin(self, callbacks: Any, logs: Any = None) -> None:
        recorder = self._recorder
        if not recorder.trains:
            _require_init()
            recorder.fits = True
            if not recorder.steps:
                model = callbacks._model
                _describe(recorder, [model], optimizers_of(model))
                self._write(model)

    def note(self, callbacks: Any, batch: int, logs: Any = None) -> None:
        recorder = self._recorder
        if recorder.fits:
            recorder.steps += 1
            self._write(callbacks._model)
            _end_if_enough(recorder)

    def _write(self, model: keras.Model) -> None:
        alike = trained_variables(model)
        _write(self._recorder, _state_of(model), [variable.path for variable in alike])

    def end(self, callbacks: Any, logs: Any = None) -> None:
        self._recorder.fits = False


def _noting(apply: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return `BaseOptimizer.apply`, which notes the variables and, averaged over all ranks by now, the gradients."""

    def noting(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if recorder.backwards and not recorder.trains:
            grads = [
                gradient if gradient is None else _as_reordered(gradient) for gradient in grads
            ]
        if recorder.trains or recorder.fits:
            return apply(optimizer, grads, trainable_variables)
        _require_init()
        grads = list(grads)
        trained = list(trainable_variables or optimizer._trainable_variables)

        def begin(now: dict[str, np.ndarray]) -> None:
            if not recorder.steps:
                _describe(recorder, recorder.models, [optimizer])
                _write(recorder, now, _alike(trained, optimizer))

        def count(now: dict[str, np.ndarray]) -> None:
            recorder.steps += 1
            if recorder.steps <= recorder.most:
                _write(recorder, now, _alike(trained, optimizer))

        _when_run(begin, _read(trained, optimizer))
        result = apply(optimizer, grads, trainable_variables)
        given = {
            f"{GRADIENT_OF}{variable.path}": tf.convert_to_tensor(gradient)
            for gradient, variable in zip(grads, trained, strict=True)
            if gradient is not None
        }
        _when_run(count, _read(trained, optimizer) | given)
        if tf.executing_eagerly():
            _end_if_enough(recorder)
        return result

    return noting


def _as_reordered(gradient: Any) -> Any:
    """Return a gradient whose values go up and down in turns, about as far as another order of their sums makes them.

    That is ROUNDING for the largest value, and relatively more for small ones, which are what is left of larger terms;
    but what is 0 stays 0, as it has no terms (a pixel that is always dark).
    """
    if isinstance(gradient, tf.IndexedSlices):
        values = _as_reordered(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    signs = 1 - 2 * (tf.range(tf.size(gradient)) % 2)
    sizes = tf.abs(gradient)
    change = ROUNDING * tf.sqrt(sizes) * tf.sqrt(tf.reduce_max(sizes))
    return gradient + change * tf.cast(tf.reshape(signs, tf.shape(gradient)), gradient.dtype)


def _when_run(note: Callable[[dict[str, np.ndarray]], None], values: Mapping[str, Any]) -> None:
    """Call `note` with `values` as arrays: now, or whenever the graph that is being made reaches this place."""
    names = list(values)

    def call(*arrays: np.ndarray) -> None:
        note(dict(zip(names, arrays, strict=True)))

    if tf.executing_eagerly():
        call(*(value.numpy() for value in values.values()))
    else:
        tf.numpy_function(call, list(values.values()), [])


def _read(trained: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    variables = unique([*trained, *optimizer.variables])
    return {variable.path: tf_variable(variable).read_value() for variable in variables}


def _alike(trained: Sequence[Any], optimizer: Any) -> list[str]:
    """Return the paths of the variables that all ranks hold alike after a step."""
    state = replicated_variables(None, optimizer, local_variables(None, optimizer))
    found = without([*trained, *state], local_variables(None, optimizer))
    return [variable.path for variable in found]


def _state_of(model: keras.Model) -> dict[str, np.ndarray]:
    found = unique([*model.variables, *optimizer_variables(model)])
    return {variable.path: tf_variable(variable).numpy() for variable in found}


def _require_init() -> None:
    if not is_initialized():
        raise UsageError(
            "the script trains without hvdtrain.init(), so each worker would train on its own. To compare an ordinary "
            "Keras script, run hvdtrain verify --adopt"
        )


def _know(recorder: Recorder, model: keras.Model) -> None:
    if not (recorder.trains or recorder.fits or any(model is one for one in recorder.models)):
        recorder.models.append(model)


def _describe(recorder: Recorder, models: Sequence[keras.Model], optimizers: Sequence[Any]) -> None:
    if ALL_RANKS.rank() == 0:
        facts = facts_of(models, optimizers)
        write_facts(recorder.folder, facts if ALL_RANKS.size() > 1 else facts | {"warnings": []})


def _write(recorder: Recorder, arrays: Mapping[str, np.ndarray], alike: Sequence[str]) -> None:
    """Record a step.

    Args:
        recorder: Where to.
        arrays: Variables and gradients by name.
        alike: Names of the variables that are the same on all ranks.
    """
    rank = ALL_RANKS.rank()
    if rank == 0:
        write_step(recorder.folder, RecordedStep(recorder.steps, (), {}, arrays))
    if ALL_RANKS.size() > 1:
        replicas = {name: arrays[name] for name in alike if name in arrays}
        write_replicas(recorder.folder, rank, recorder.steps, replicas)


def _end_if_enough(recorder: Recorder) -> None:
    if recorder.steps >= recorder.most and tf.executing_eagerly():
        raise EnoughSteps


def _followed(owner: type, name: str, after: Callable[..., None]) -> Any:
    """Return a context in which `after` follows each call of the method."""
    method = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        after(self, *args, **kwargs)
        return result

    return mock.patch.object(owner, name, call)
