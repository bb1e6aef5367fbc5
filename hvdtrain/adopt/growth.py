"""Batches and learning rates that grow with the number of workers, if the user wants them to."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.adopt_options import AdoptOptions, Scaling
from hvdtrain.keras.learning_rate import require_settable
from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.keras_internals.optimizers import inner_of
from hvdtrain.trainer.learning_rate_scaling import SCALINGS, scale_learning_rate


class Growth:
    """How the batches of a script's fits, and the learning rates, depend on the number of workers."""

    def __init__(self, options: AdoptOptions) -> None:
        self._batch, self._scaling = options.batch, options.learning_rate

    @property
    def is_asked_for(self) -> bool:
        """Whether anything depends on it."""
        return (self._batch, self._scaling) != ("global", "none")

    def require_settable(self, model: keras.Model) -> None:
        """Raise UsageError if a learning rate of a model is to be scaled, and cannot be."""
        for optimizer in map(inner_of, optimizers_of(model)) if self._scaling != "none" else ():
            require_settable(optimizer, f"--adopt-learning-rate {self._scaling}")

    def examples(self, batch: int, workers: int) -> int:
        """Return the number of examples in a global batch, where the script has `batch`."""
        return batch * workers if self._batch == "per-worker" else batch

    def rates(self, model: keras.Model, workers: int) -> ScaledRates:
        """Return the learning rates of a model for a fit by this number of workers."""
        return ScaledRates(model, self._scaling, workers)


class ScaledRates:
    """Learning rates that are multiplied while a fit runs, as a context.

    Before and after it the script has its own rates, so a model that it saves, copies or trains again is not scaled
    twice.
    """

    def __init__(self, model: keras.Model, scaling: Scaling, workers: int) -> None:
        self._model, self._scaling, self._workers = model, scaling, workers
        self._factor = SCALINGS[scaling](workers)
        self._scaled: list[Any] = []

    def __enter__(self) -> ScaledRates:
        return self

    def scale(self) -> str:
        """Multiply the rates of the model's optimizers, and return what the user is told of it."""
        if self._factor == 1:
            return ""
        for optimizer in map(inner_of, optimizers_of(self._model)):
            scale_learning_rate(optimizer, self._scaling, self._workers)
            self._scaled.append(optimizer)
        return f", with {self._factor:.3g} times the learning rate"

    def __exit__(self, *error: object) -> None:
        for optimizer in self._scaled:
            optimizer.learning_rate = float(optimizer.learning_rate) / self._factor
