"""From what the user gave as `Trainer(strategy=...)` to a Strategy."""

from __future__ import annotations

import importlib
import os

from hvdtrain.errors import UsageError
from hvdtrain.strategies.strategy import Strategy
from hvdtrain.strategy_names import (
    CENTRAL_STORAGE,
    HOROVOD,
    PARAMETER_SERVER,
    TPU,
    choose_strategy,
    strategy_of,
)

CLASSES = {
    HOROVOD: "hvdtrain.strategies.horovod:HorovodStrategy",
    TPU: "hvdtrain.strategies.tpu:TPU",
    CENTRAL_STORAGE: "hvdtrain.strategies.central_storage:CentralStorage",
    PARAMETER_SERVER: "hvdtrain.strategies.parameter_server:ParameterServer",
}


def make_strategy(wanted: str | Strategy | None) -> Strategy:
    """Return the strategy that `wanted` names; None: what HVDTRAIN_STRATEGY says, else Horovod's.

    Raises:
        UsageError: no such strategy.
    """
    if isinstance(wanted, Strategy):
        return wanted
    if wanted is not None and not isinstance(wanted, str):
        raise UsageError(
            f"strategy: give a name or a Strategy of hvdtrain.strategies, not {type(wanted).__name__}"
        )
    name = strategy_of(os.environ) if wanted is None else choose_strategy(wanted).name
    module, _, attribute = CLASSES[name].partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), attribute)()
    return strategy
