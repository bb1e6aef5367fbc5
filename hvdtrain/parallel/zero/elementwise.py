"""Which optimizers update each element from that element's own gradient and state alone.

Only those can work on parts of variables. They are known by class: a subclass may do anything, so one of a
user's own says so itself, by a class attribute `hvdtrain_elementwise = True`.
"""

from __future__ import annotations

from typing import Any

from keras import optimizers

from hvdtrain.errors import UsageError

ELEMENTWISE = (
    *(optimizers.SGD, optimizers.RMSprop, optimizers.Adam, optimizers.AdamW, optimizers.Adamax),
    *(optimizers.Nadam, optimizers.Adagrad, optimizers.Adadelta, optimizers.Ftrl, optimizers.Lion),
)
WHOLE = {
    "Lamb": "scales each step by the norm of the whole variable",
    "Muon": "makes each step from the whole matrix",
    "Adafactor": "keeps averages over whole rows and columns",
    "ScheduleFreeAdamW": "begins with a state made from the weights",
    "MultiOptimizer": "holds several optimizers",
}
"""Keras's other optimizers: why not."""


def require_elementwise(optimizer: Any) -> None:
    """Raise UsageError unless `optimizer` can update parts of variables."""
    kind = type(optimizer)
    if kind in ELEMENTWISE or getattr(kind, "hvdtrain_elementwise", False):
        return
    known = ", ".join(each.__name__ for each in ELEMENTWISE)
    if kind.__module__.startswith("keras.") and kind.__name__ in WHOLE:
        raise UsageError(
            f"The state of {kind.__name__} cannot be sharded: it {WHOLE[kind.__name__]}. Use one of {known}, or leave "
            "shard_optimizer out"
        )
    raise UsageError(
        f"The state of {kind.__name__} cannot be sharded unless it updates each element by that element's gradient and "
        f"state alone, as {known} do. If it does, say so: give the class an attribute hvdtrain_elementwise = True"
    )
