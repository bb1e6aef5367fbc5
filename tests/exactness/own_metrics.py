"""Metrics that users write."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


def rmse(y: Any, p: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y - p)))


def mean_error(y: Any, p: Any) -> Any:
    return ops.mean(ops.abs(y - p))


def each_error(y: Any, p: Any) -> Any:
    return ops.mean(ops.abs(y - p), axis=-1)


def largest_error(y: Any, p: Any) -> Any:
    return ops.max(ops.abs(y - p))


def summed_error(y: Any, p: Any) -> Any:
    return ops.sum(ops.abs(y - p))


def masked_accuracy(y: Any, p: Any) -> Any:
    """TensorFlow's tutorial."""
    right = ops.cast(ops.equal(y, ops.cast(ops.argmax(p, -1), y.dtype)), "float32")
    mask = ops.cast(ops.not_equal(y, 0), "float32")
    return ops.sum(right * mask) / ops.sum(mask)


def dice(y: Any, p: Any) -> Any:
    y = ops.cast(y, p.dtype)
    return 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p))


class _Own(keras.metrics.Metric):
    """One state of one number."""

    begin = "zeros"
    kind = "float32"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name or type(self).__name__.lower())
        self.state = self.add_variable((), self.begin, dtype=self.kind, name="state")

    def result(self) -> Any:
        return self.state


class Worst(_Own):
    """The largest error so far."""

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign(ops.maximum(self.state, ops.max(ops.abs(y - p))))


class Best(_Own):
    """The smallest error so far; it begins with 1000."""

    begin = staticmethod(lambda shape, dtype=None: ops.full(shape, 1000.0, dtype))

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign(ops.minimum(self.state, ops.min(ops.abs(y - p))))

    def reset_state(self) -> None:
        self.state.assign(1000.0)


class Last(_Own):
    """The mean error of the last batch."""

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign(ops.mean(ops.abs(y - p)))


class Total(_Own):
    """The sum of all errors."""

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign_add(ops.sum(ops.abs(y - p)))


class Steps(_Own):
    """Counts batches, as a float."""

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign_add(1.0)


class WholeSteps(Steps):
    """Counts batches, as an integer."""

    kind = "int32"

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign_add(1)


class Examples(_Own):
    """Counts examples by their shape."""

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign_add(ops.cast(ops.shape(p)[0], "float32"))


class Smooth(_Own):
    """A moving average of the batches' errors."""

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign(0.8 * self.state + 0.2 * ops.mean(ops.abs(y - p)))


class Geometric(_Own):
    """The mean of the logarithm of each batch's error."""

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign_add(ops.log(ops.mean(ops.abs(y - p))))


class Several(keras.metrics.Metric):
    """Its result is a dict."""

    def __init__(self) -> None:
        super().__init__(name="several")
        self.error, self.square = keras.metrics.Mean(), keras.metrics.Mean()

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.error.update_state(ops.mean(ops.abs(y - p), axis=-1))
        self.square.update_state(ops.mean(ops.square(y - p), axis=-1))

    def result(self) -> Any:
        return {"error": self.error.result(), "square": self.square.result()}

    def reset_state(self) -> None:
        self.error.reset_state()
        self.square.reset_state()
