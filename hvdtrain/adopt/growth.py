"""Batches and learning rates that grow with the number of workers, if the user wants them to."""

from __future__ import annotations

import weakref
from typing import Any

import keras

from hvdtrain.adopt_options import AdoptOptions
from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.keras_internals.optimizers import inner_of
from hvdtrain.trainer.learning_rate_scaling import SCALINGS, scale_learning_rate


class Growth:
    """How the batches of a script's fits, and the learning rates, depend on the number of workers."""

    def __init__(self, options: AdoptOptions) -> None:
        self._batch, self._scaling = options.batch, options.learning_rate
        self._scaled: weakref.WeakSet[Any] = weakref.WeakSet()

    def examples(self, batch: int, workers: int) -> int:
        """Return the number of examples in a global batch, where the script has `batch`."""
        return batch * workers if self._batch == "per-worker" else batch

    def scale(self, model: keras.Model, workers: int) -> str:
        """Scale the learning rates of the model's optimizers, each once, and return what the user is told of it.

        Raises:
            UsageError: A learning rate is a LearningRateSchedule, which cannot be scaled.
        """
        for optimizer in map(inner_of, optimizers_of(model)):
            if optimizer not in self._scaled:
                scale_learning_rate(optimizer, self._scaling, workers)
                self._scaled.add(optimizer)
        factor = SCALINGS[self._scaling](workers)
        return "" if factor == 1 else f", with {factor:.3g} times the learning rate"
