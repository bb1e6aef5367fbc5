"""Elementwise optimizers: those that update each element from that element's gradient and state alone.

Only they can update parts of variables. Keras's are listed by class. Subclasses may do anything, so a user's own
optimizer class declares it by the attribute `hvdtrain_elementwise = True`.
"""

from __future__ import annotations

from typing import Any

from keras import optimizers

from hvdtrain.errors import UsageError

ELEMENTWISE = (
    optimizers.SGD,
    optimizers.RMSprop,
    optimizers.Adam,
    optimizers.AdamW,
    optimizers.Adamax,
    optimizers.Nadam,
    optimizers.Adagrad,
    optimizers.Adadelta,
    optimizers.Ftrl,
    optimizers.Lion,
)
WHOLE = {
    "LARS": "scales each step by the norm of the whole variable",
    "Lamb": "scales each step by the norm of the whole variable",
    "Muon": "makes each step from the whole matrix",
    "Adafactor": "keeps averages over whole rows and columns",
    "ScheduleFreeAdamW": "initializes its state from the weights",
    "MultiOptimizer": "holds several optimizers",
}
"""Other optimizers of Keras and of hvdtrain, and why they are not elementwise."""


def require_elementwise(optimizer: Any, cannot: str) -> None:
    """Check that `optimizer` can update parts of variables.

    Args:
        optimizer: A Keras optimizer, without loss scaling.
        cannot: What the message says of any other optimizer, such as "cannot be sharded".

    Raises:
        UsageError: It is not known to be elementwise.
    """
    kind = type(optimizer)
    if kind in ELEMENTWISE or getattr(kind, "hvdtrain_elementwise", False):
        return
    known = ", ".join(each.__name__ for each in ELEMENTWISE)
    reason = "may look at more than one element of a variable"
    if kind.__module__.startswith(("keras.", "hvdtrain.")):
        reason = WHOLE.get(kind.__name__, reason)
    raise UsageError(
        f"{kind.__name__} {cannot}: it {reason}. Use one of {known}; if your own optimizer "
        "updates each element from that element's gradient and state alone, give its class the "
        "attribute hvdtrain_elementwise = True"
    )
