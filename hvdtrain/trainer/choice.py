"""From what the user gave Trainer (strategy, layout, shard_optimizer) to a Strategy."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from hvdtrain.parallel.layout import Layout
    from hvdtrain.parallel.mesh import Mesh

# Loaded when they are chosen: each brings what only it needs.
CLASSES = {
    TPU: "hvdtrain.strategies.tpu:TPU",
    CENTRAL_STORAGE: "hvdtrain.strategies.central_storage:CentralStorage",
    PARAMETER_SERVER: "hvdtrain.strategies.parameter_server:ParameterServer",
}


def make_strategy(
    wanted: str | Strategy | None,
    layout: Layout | Mesh | None = None,
    shard_optimizer: bool = False,
) -> Strategy:
    """Return the strategy that `wanted` names; None: what HVDTRAIN_STRATEGY says, else Horovod's.

    Args:
        wanted: a name or a Strategy.
        layout: a Layout, or a Mesh alone, of a model that is divided over Horovod's ranks.
        shard_optimizer: divide the optimizer's state over the ranks (Horovod's alone).

    Raises:
        UsageError: no such strategy, or one that knows no layout.
    """
    if isinstance(wanted, Strategy):
        _refuse_division(type(wanted).__name__, layout, shard_optimizer)
        return wanted
    if wanted is not None and not isinstance(wanted, str):
        raise UsageError(
            f"strategy: give a name or a Strategy of hvdtrain.strategies, not {type(wanted).__name__}"
        )
    name = strategy_of(os.environ) if wanted is None else choose_strategy(wanted).name
    if name == HOROVOD:
        return _horovod_strategy(layout, shard_optimizer)
    _refuse_division(name, layout, shard_optimizer)
    strategy: Strategy = _load(CLASSES[name])()
    return strategy


def _horovod_strategy(layout: Layout | Mesh | None, shard_optimizer: bool) -> Strategy:
    from hvdtrain.keras.optimizer import distribute
    from hvdtrain.strategies.horovod import HorovodStrategy

    wrap = _load("hvdtrain.parallel.zero.optimizer:shard") if shard_optimizer else distribute
    if layout is None and not shard_optimizer:
        return HorovodStrategy(wrap)
    if layout is None:
        divided: Strategy = _load("hvdtrain.parallel.saving:DividedStrategy")(wrap)
        return divided
    from hvdtrain.parallel.layout import Layout
    from hvdtrain.parallel.mesh import Mesh

    if isinstance(layout, Mesh):
        layout = Layout(layout)
    if not isinstance(layout, Layout):
        raise UsageError(f"layout: give an hvdtrain.Layout or Mesh, not {type(layout).__name__}")
    kind = "pipeline" if layout.mesh.pipeline > 1 else "tensor"
    strategy: Strategy = _load(
        {
            "pipeline": "hvdtrain.parallel.pipeline.strategy:PipelineStrategy",
            "tensor": "hvdtrain.parallel.tensor.strategy:TensorStrategy",
        }[kind]
    )(layout, wrap)
    return strategy


def _refuse_division(name: str, layout: Layout | Mesh | None, shard_optimizer: bool) -> None:
    for option, given in (("layout", layout is not None), ("shard_optimizer", shard_optimizer)):
        if given:
            raise UsageError(
                f"{option} divides a model over Horovod's ranks, and the strategy is {name}: leave out one of the two"
            )


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
