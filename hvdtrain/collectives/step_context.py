"""The step that is being run or traced: this rank's share of the global batch, and how it weights the gradients.

With n examples in the global batch and n_r on rank r, each rank's loss, or its gradients, are multiplied by its share
n_r / n and then summed over the ranks: sum_r (n_r / n) (S_r / n_r) = sum_r S_r / n, the mean over the global batch.
The optimizer, losses and synchronized layers call `current_step`; outside a step it returns None, and they work as in
plain Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from hvdtrain.errors import UsageError

Total: TypeAlias = Callable[[tf.Tensor], tf.Tensor]
"""Returns the sum of a loss's divisor over the global batch, given the divisor of this rank's part: float32 scalars."""


@dataclass(frozen=True, eq=False)
class Step:
    """Context of one step on one rank.

    Attributes:
        share: This rank's examples / global examples, a float32 scalar variable or tensor. 0: the rank is idle,
            and its batch is a filler that must not count.
        total: Sums a loss's divisor over the ranks, for losses that are not divided by the number of examples.
        share_in_loss: Whether `optimizer.scale_loss` multiplies the loss by the share, which costs nothing and, with
            loss scaling, comes before anything can overflow; otherwise the gradients are multiplied.
        loss_is_sum: Whether the model's compute_loss returns a sum over examples, not a mean.
        checked: Whether a probe has shown that the steps of the parts of a batch add up to that of the batch.
        once: id() of the tf.Variables whose sparse gradient has as many rows for any batch size, such as positions
            that are looked up once for a batch, not for each example; None: not tested.
        half: id() of the tf.Variables whose gradients are computed in float16.
    """

    share: Any
    total: Total
    share_in_loss: bool
    loss_is_sum: bool = False
    checked: bool = False
    once: frozenset[int] | None = None
    half: frozenset[int] = frozenset()

    def weigh_loss(self, loss: Any) -> Any:
        """Return `loss`, in `optimizer.scale_loss`, times the share if `share_in_loss`."""
        return loss * tf.cast(self.share, loss.dtype) if self.share_in_loss else loss

    def is_idle(self) -> tf.Tensor:
        """Return whether this rank has only a filler batch, as a bool scalar."""
        return tf.equal(self.share, 0)


_CURRENT: ContextVar[Step | None] = ContextVar("hvdtrain_step", default=None)


def current_step() -> Step | None:
    """Return the step that is being run or traced in this thread; None outside of one."""
    return _CURRENT.get()


@contextlib.contextmanager
def in_step(step: Step | None) -> Iterator[None]:
    """Context in which `current_step` returns `step`."""
    token = _CURRENT.set(step)
    try:
        yield
    finally:
        _CURRENT.reset(token)


_PRESENT: ContextVar[frozenset[int] | None] = ContextVar("hvdtrain_present", default=None)


@contextlib.contextmanager
def without_others(ranks: Iterable[int]) -> Iterator[None]:
    """Context that only `ranks` enter, such as a trial of a step, or work of one rank while the others wait for it."""
    token = _PRESENT.set(frozenset(ranks))
    try:
        yield
    finally:
        _PRESENT.reset(token)


def require_present(ranks: Collection[int]) -> None:
    """Require that `ranks` can take part in a collective, which would wait for them forever.

    Raises:
        UsageError: The current context is `without_others`, and some of `ranks` are among those.
    """
    present = _PRESENT.get()
    if present is not None and not present.issuperset(ranks):
        others = sorted(set(ranks) - present)
        raise UsageError(
            "a collective is called here, in which all workers must take part, but only rank "
            f"{', '.join(map(str, sorted(present)))} runs this, and not {', '.join(map(str, others))}: call it where "
            "every rank does"
        )
