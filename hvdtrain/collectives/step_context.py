"""The step that is being run or traced: which part of the global batch this rank computes.

The one place where a rank's part is weighed. With n examples in the global batch and n_r on rank r, each rank's
loss, or its gradients, are multiplied by its share n_r / n and then added up over the ranks:
sum_r (n_r / n) (S_r / n_r) = sum_r S_r / n, the mean over the global batch. Whoever takes part (the optimizer, losses,
synchronized layers) asks `current_step`; outside a step it returns None, and everything is Keras's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

Total: TypeAlias = Callable[[tf.Tensor], tf.Tensor]
"""Returns the sum over the global batch of what a loss divides by in this part of it, both float32 scalars."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step on one rank.

    Attributes:
        share: this rank's examples / global examples, a float32 scalar variable or tensor. 0: the rank is idle,
            and its batch is a filler that must not count.
        total: of what a loss is divided by, where that is not the number of examples.
        share_in_loss: the step passes its loss through `optimizer.scale_loss`, where the share costs nothing and,
            with loss scaling, comes before anything can overflow; otherwise the gradients are multiplied by it.
        loss_is_sum: what the model's compute_loss returns is a sum over examples, not a mean.
        checked: the probe has found that the step of a batch is what those of its parts add up to.
        once: id() of the tf.Variables that are looked up as often for a batch of any size.
        half: id() of the tf.Variables whose gradients are computed in float16.
    """

    share: Any
    total: Total
    share_in_loss: bool
    loss_is_sum: bool = False
    checked: bool = False
    once: frozenset[int] = frozenset()
    half: frozenset[int] = frozenset()

    def weigh_loss(self, loss: Any) -> Any:
        """Return `loss`, on its way through `optimizer.scale_loss`, times the share if it belongs there."""
        return loss * tf.cast(self.share, loss.dtype) if self.share_in_loss else loss

    def is_idle(self) -> tf.Tensor:
        """Whether this rank has nothing but a filler: a bool scalar."""
        return tf.equal(self.share, 0)


_CURRENT: ContextVar[Step | None] = ContextVar("hvdtrain_step", default=None)


def current_step() -> Step | None:
    """Return the step that is being run or traced in this thread; None outside of one."""
    return _CURRENT.get()


@contextlib.contextmanager
def in_step(step: Step | None) -> Iterator[None]:
    """In this block `current_step` returns `step`."""
    token = _CURRENT.set(step)
    try:
        yield
    finally:
        _CURRENT.reset(token)
