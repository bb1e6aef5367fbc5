"""Creates the Strategy from the Trainer's arguments `strategy`, `layout`, `shard_optimizer` and `sync`."""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UsageError
from hvdtrain.strategies.round_plan import DiLoCo, LocalSGD
from hvdtrain.strategies.strategy import Strategy
from hvdtrain.strategy_names import HOROVOD, STRATEGIES, choose_strategy, strategy_of

if TYPE_CHECKING:
    from hvdtrain.collectives.mesh import Mesh
    from hvdtrain.parallel.layout import Layout
    from hvdtrain.strategies.rounds import Sync

# Imported only when chosen, as strategies are.
RUNNERS = {
    "tensor": "hvdtrain.parallel.tensor.convert:SplitRunner",
    "pipeline": "hvdtrain.parallel.pipeline.stage_runner:StageRunner",
}
"""Kind of parallelism -> class that builds the model and runs its steps."""


def make_strategy(
    wanted: str | Strategy | None,
    layout: Layout | Mesh | None = None,
    shard_optimizer: bool = False,
    sync: Sync | None = None,
) -> Strategy:
    """Return the strategy named `wanted`.

    Args:
        wanted: Name of a strategy, or a Strategy, which is returned as it is. None: the name in the variable
            HVDTRAIN_STRATEGY, else "horovod".
        layout: Layout, or only the Mesh, of a model that is divided over the ranks. Only for "horovod".
        shard_optimizer: Whether to divide the optimizer state over the ranks (ZeRO-1). Only for "horovod".
        sync: How ranks synchronize that train alone for some steps. Only for "horovod", and without the two above.

    Raises:
        UsageError: If there is no such strategy, or it cannot divide a model or its optimizer, or train in rounds.
    """
    _check_sync(sync, layout, shard_optimizer)
    if isinstance(wanted, Strategy):
        _refuse_division(type(wanted).__name__, layout, shard_optimizer, sync)
        return wanted
    if wanted is not None and not isinstance(wanted, str):
        raise UsageError(
            f"strategy: pass a name or a Strategy of hvdtrain.strategies, not {type(wanted).__name__}"
        )
    name = strategy_of(os.environ) if wanted is None else choose_strategy(wanted).name
    parts: dict[str, Any] = {}
    if name == HOROVOD:
        parts = _parts(layout, shard_optimizer, sync)
    else:
        _refuse_division(name, layout, shard_optimizer, sync)
    strategy: Strategy = _load(STRATEGIES[name].place)(**parts)
    return strategy


def _parts(
    layout: Layout | Mesh | None, shard_optimizer: bool, sync: Sync | None
) -> dict[str, Any]:
    """Return the arguments of HorovodStrategy that differ from its defaults."""
    parts: dict[str, Any] = {}
    if sync is not None:
        parts["runner"] = partial(_load("hvdtrain.strategies.rounds:RoundRunner"), sync)
        parts["wrap"] = _load("hvdtrain.strategies.rounds:trained_alone")
    divided = shard_optimizer
    if shard_optimizer:
        parts["wrap"] = _load("hvdtrain.parallel.zero.sharded_optimizer:shard")
    if layout is not None:
        from hvdtrain.parallel.layout import as_layout

        plan = as_layout(layout)
        divided |= plan.mesh.tensor * plan.mesh.pipeline > 1
        in_micro_batches = plan.mesh.pipeline > 1 or plan.micro_batches != 1
        runner = _load(RUNNERS["pipeline" if in_micro_batches else "tensor"])
        parts |= {"mesh": plan.mesh, "runner": partial(runner, plan)}
    if divided:
        parts["state"] = _load("hvdtrain.parallel.whole_file:DividedState")
    return parts


def _check_sync(sync: Any, layout: Layout | Mesh | None, shard_optimizer: bool) -> None:
    if sync is None:
        return
    if not isinstance(sync, LocalSGD | DiLoCo):
        raise UsageError(
            f"sync={sync!r}: pass hvdtrain.LocalSGD(every=...) or hvdtrain.DiLoCo(every=...)"
        )
    if layout is not None or shard_optimizer:
        raise UsageError(
            "sync trains a whole model on each rank between rounds, but layout and shard_optimizer divide the model or "
            "its optimizer over the ranks: use only one of the two"
        )


def _refuse_division(
    name: str, layout: Layout | Mesh | None, shard_optimizer: bool, sync: Sync | None
) -> None:
    if sync is not None:
        raise UsageError(
            f"sync works with strategy='horovod', but the strategy is {name}: leave out one of the two"
        )
    for option, given in (("layout", layout is not None), ("shard_optimizer", shard_optimizer)):
        if given:
            raise UsageError(
                f"{option} divides a model over Horovod's ranks, but the strategy is {name}: leave "
                "out one of the two"
            )


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
