"""Which strategy the Trainer takes, and what excludes what."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from hvdtrain.collectives.mesh import Mesh
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import DistributedOptimizer
from hvdtrain.strategies import Strategy
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategy_names import STRATEGIES
from hvdtrain.trainer.strategy_choice import make_strategy


def test_horovod_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVDTRAIN_STRATEGY", raising=False)
    for wanted in (None, "horovod", "mirrored", "MultiWorkerMirroredStrategy"):
        assert type(make_strategy(wanted)) is HorovodStrategy


def test_the_environment_chooses_where_the_script_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_STRATEGY", "no-such")
    with pytest.raises(UsageError, match="HVDTRAIN_STRATEGY: no such strategy: 'no-such'"):
        make_strategy(None)
    assert type(make_strategy("horovod")) is HorovodStrategy


def test_a_strategy_of_ones_own() -> None:
    own = Strategy()
    assert make_strategy(own) is own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wanted": 3}, "strategy: pass a name or a Strategy of hvdtrain.strategies, not int"),
        ({"wanted": "tpus"}, "no such strategy: 'tpus'. Did you mean 'tpu'"),
        ({"wanted": Strategy(), "shard_optimizer": True}, "shard_optimizer divides a model .* Strategy"),
        ({"wanted": "horovod", "layout": "2x2"}, "layout: expected an hvdtrain.Layout or Mesh, not str"),
        *(({"wanted": name, "layout": Mesh(2)}, f"strategy is {name}") for name in STRATEGIES if name != "horovod"),
    ],
)  # fmt: skip
def test_what_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_strategy(**arguments)


def test_an_optimizer_that_is_distributed_already_cannot_be_sharded() -> None:
    strategy = make_strategy("horovod", shard_optimizer=True)
    strategy.start(0)
    optimizer = DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(UsageError, match=r"shard_optimizer=True .*: pass a plain optimizer"):
        strategy.distribute(optimizer)
