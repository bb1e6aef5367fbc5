"""hvdtrain.keras has every public name of horovod.tensorflow.keras, with its arguments."""

import inspect
import json
import os
import subprocess
import sys

import horovod.keras
import horovod.tensorflow
import horovod.tensorflow.keras as horovod_keras
import pytest

import hvdtrain.keras as hvd
from hvdtrain.keras.legacy import uses_legacy_keras

MODULES = {"K", "inspect", "is_version_greater_equal_than", "keras", "tf", "version", "warnings"}
NAMES = [n for n in vars(horovod_keras) if not n.startswith("_") and n not in MODULES]
CALLBACKS = [
    "BroadcastGlobalVariablesCallback",
    "MetricAverageCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "BestModelCheckpoint",
]


def arguments(function: object) -> list[tuple[str, object]]:
    """Positional arguments with their defaults; process sets and None mean the same there."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    found = [(p.name, p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    return [(name, None if name == "process_set" else default) for name, default in found]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_horovods(name: str) -> None:
    assert hasattr(hvd, name)


@pytest.mark.parametrize(
    "name",
    [n for n in NAMES if inspect.isfunction(getattr(horovod_keras, n)) and n != "init"],
)
def test_arguments_of_functions(name: str) -> None:
    ours = {k: v for k, v in arguments(getattr(hvd, name)) if k != "compression"}
    theirs = {k: v for k, v in arguments(getattr(horovod_keras, name)) if k != "compression"}
    assert ours == theirs
    assert [k for k, _ in arguments(getattr(hvd, name))] == [
        k for k, _ in arguments(getattr(horovod_keras, name))
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("alltoall", "grouped_allreduce", "grouped_allgather", "grouped_reducescatter"),
        *("rank_op", "local_rank_op", "size_op", "local_size_op", "process_set_included_op"),
    ],
)
def test_arguments_of_what_training_loops_import(name: str) -> None:
    ours = [pair for pair in arguments(getattr(hvd, name)) if pair[0] != "compression"]
    theirs = [
        pair for pair in arguments(getattr(horovod.tensorflow, name)) if pair[0] != "compression"
    ]
    assert ours == theirs


@pytest.mark.parametrize("name", ["allreduce", "allgather", "broadcast", "reducescatter"])
def test_keywords_of_what_training_loops_import(name: str) -> None:
    """Their first argument has another name in Horovod's two modules; the scope of names never counts here."""
    ours = inspect.signature(getattr(hvd, name)).parameters
    theirs = list(inspect.signature(getattr(horovod.tensorflow, name)).parameters)[1:]
    assert [keyword for keyword in theirs if keyword not in ours] == ["ignore_name_scope"]


@pytest.mark.parametrize("name", ["TensorFlowState", "TensorFlowKerasState"])
def test_arguments_of_states(name: str) -> None:
    ours = arguments(getattr(hvd.elastic, name))
    assert ours == arguments(getattr(horovod.tensorflow.elastic, name))


@pytest.mark.parametrize("name", CALLBACKS)
def test_arguments_of_callbacks(name: str) -> None:
    theirs = arguments(getattr(horovod_keras.callbacks, name))
    assert arguments(getattr(hvd.callbacks, name)) == theirs


def test_names_of_horovod_keras() -> None:
    assert hasattr(horovod.keras, "PartialDistributedOptimizer")
    assert hasattr(hvd, "PartialDistributedOptimizer")
    assert hasattr(hvd, "Adasum")


@pytest.mark.parametrize(
    ("value", "legacy"), [("1", True), ("True", True), ("0", False), ("", False)]
)
def test_which_keras(value: str, legacy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", value)
    assert uses_legacy_keras() is legacy


SHOW = """
import json
import hvdtrain.keras as hvd
print(json.dumps([hvd.DistributedOptimizer.__module__, hvd.callbacks.K.__name__, hvd.init.__module__]))
"""


def run_legacy(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_keras_2_gets_horovods_own_names() -> None:
    pytest.importorskip("tf_keras")
    ran = run_legacy(SHOW)
    assert ran.returncode == 0, ran.stderr
    expected = ["horovod.tensorflow.keras", "tf_keras.backend", "hvdtrain.runtime"]
    assert json.loads(ran.stdout.splitlines()[-1]) == expected


def test_keras_2_without_tf_keras_is_one_clear_error() -> None:
    ran = run_legacy("import sys; sys.modules['tf_keras'] = None; import hvdtrain.keras")
    assert "EngineError: TF_USE_LEGACY_KERAS is set, but tf-keras cannot be loaded" in ran.stderr
