"""Which strategy a name, or a process's environment, means."""

from __future__ import annotations

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.strategy_names import (
    ALIASES,
    STRATEGIES,
    choose_strategy,
    replicas_of,
    strategy_of,
)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_by_its_name_and_by_its_class(name: str) -> None:
    in_tf_distribute = {
        "tpu": "TPUStrategy",
        "central-storage": "CentralStorageStrategy",
        "parameter-server": "ParameterServerStrategy",
    }
    written = [name, name.replace("-", "_"), name.upper(), in_tf_distribute.get(name, name)]
    for text in written:
        choice = choose_strategy(text)
        assert (choice.name, choice.note) == (name, "")


@pytest.mark.parametrize(
    "name", ["mirrored", "multi-worker-mirrored", "MultiWorkerMirroredStrategy"]
)
def test_what_horovod_replaces_is_explained_in_one_line(name: str) -> None:
    choice = choose_strategy(name)
    assert choice.name == "horovod"
    assert "Strategy does" in choice.note
    assert ": using horovod, which does what " in choice.note
    assert "\n" not in choice.note


def test_all_aliases_stand_with_what_replaces_them() -> None:
    assert set(STRATEGIES["horovod"].replaces) == set(ALIASES)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("central", "Did you mean 'central-storage'?"),
        ("parameter-servers", "Did you mean 'parameter-server'?"),
        ("xyz", "Choose from horovod, tpu, central-storage, parameter-server, mirrored, multi-w"),
        ("", "Choose from horovod"),
    ],
)
def test_an_unknown_name(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        choose_strategy(text)
    assert str(raised.value).startswith(f"no such strategy: {text!r}. {hint}")


def test_a_process_learns_its_strategy() -> None:
    assert strategy_of({}) == strategy_of({"HVDTRAIN_STRATEGY": ""}) == "horovod"
    assert strategy_of({"HVDTRAIN_STRATEGY": "mirrored"}) == "horovod"
    assert strategy_of({"HVDTRAIN_STRATEGY": "tpu"}) == "tpu"
    with pytest.raises(
        UsageError, match=r"^HVDTRAIN_STRATEGY: no such strategy: 'tpo'. Did you mea"
    ):
        strategy_of({"HVDTRAIN_STRATEGY": "tpo"})


def test_a_process_learns_its_replicas() -> None:
    assert replicas_of({}) is None
    assert replicas_of({"HVDTRAIN_REPLICAS": "4"}) == 4
    for text in ("0", "-1", "two", "1.5", "\u0663"):
        with pytest.raises(UsageError, match="expected the number of replicas, at least 1"):
            replicas_of({"HVDTRAIN_REPLICAS": text})
