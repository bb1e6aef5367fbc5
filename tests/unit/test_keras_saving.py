"""Models with a distributed optimizer save, load and copy as models with a plain one do."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd
from hvdtrain import runtime
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.optimizers import inner_of, is_distributed

pytestmark = pytest.mark.slow
X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@keras.saving.register_keras_serializable(package="mine")
class RegisteredAdam(keras.optimizers.Adam):
    pass


class UnregisteredAdam(keras.optimizers.Adam):
    pass


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)),
    "adamw, moving average": lambda: keras.optimizers.AdamW(use_ema=True, clipnorm=1.0),
    "accumulation": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "registered": RegisteredAdam,
    "unregistered": UnregisteredAdam,
}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> None:
    runtime.start_horovod()


def trained(optimizer: Any, epochs: int = 1) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, keras.losses.MeanSquaredError(), jit_compile=False)
    train(model, epochs)
    return model


def train(model: keras.Model, epochs: int = 1) -> None:
    model.fit(X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)


def state(optimizer: Any) -> list[Any]:
    return [np.asarray(v).tolist() for v in optimizer.variables]


@pytest.mark.parametrize("ending", ["keras", "h5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_load_model_gives_a_distributed_optimizer_with_its_state(
    name: str, ending: str, tmp_path: Path
) -> None:
    model = trained(hvd.DistributedOptimizer(OPTIMIZERS[name]()))
    path = tmp_path / f"model.{ending}"
    model.save(path)
    loaded = hvd.load_model(str(path), custom_optimizers=[UnregisteredAdam])
    assert is_distributed(loaded.optimizer)
    assert isinstance(loaded.optimizer, type(OPTIMIZERS[name]()))
    assert state(loaded.optimizer) == state(model.optimizer)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    train(model)
    train(loaded)
    assert [w.tolist() for w in loaded.get_weights()] == [w.tolist() for w in model.get_weights()]


@pytest.mark.parametrize("ending", ["keras", "h5"])
def test_a_function_that_makes_the_optimizer(ending: str, tmp_path: Path) -> None:
    """As Horovod's scripts give it among custom_objects."""
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model = trained(hvd.DistributedOptimizer(UnregisteredAdam(rate)))
    path = tmp_path / f"model.{ending}"
    model.save(path)
    made = {
        "UnregisteredAdam": lambda **config: hvd.DistributedOptimizer(UnregisteredAdam(**config))
    }
    loaded = hvd.load_model(path, custom_objects=made)
    assert is_distributed(loaded.optimizer)
    assert isinstance(loaded.optimizer, UnregisteredAdam)
    assert state(loaded.optimizer) == state(model.optimizer)
    train(model)
    train(loaded)
    assert [w.tolist() for w in loaded.get_weights()] == [w.tolist() for w in model.get_weights()]


@pytest.mark.parametrize("ending", ["keras", "h5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_files_are_those_of_a_plain_optimizer(name: str, ending: str, tmp_path: Path) -> None:
    plain = OPTIMIZERS[name]()
    serialized = keras.saving.serialize_keras_object(plain)
    distributed = hvd.DistributedOptimizer(plain)
    assert keras.saving.serialize_keras_object(distributed) == serialized
    path = tmp_path / f"model.{ending}"
    model = trained(distributed)
    model.save(path)
    loaded = keras.saving.load_model(path, custom_objects={"UnregisteredAdam": UnregisteredAdam})
    assert type(loaded.optimizer) is type(OPTIMIZERS[name]())
    assert not is_distributed(loaded.optimizer)
    if ending == "keras":  # Keras 3.15 itself restores no state from .h5
        assert state(loaded.optimizer) == state(model.optimizer)


LOAD_PLAIN = """
import json, sys
sys.modules["horovod"] = sys.modules["hvdtrain"] = None  # neither can be imported
import keras
import numpy as np
found = {}
for path in sys.argv[1:]:
    model = keras.saving.load_model(path)
    model.predict(np.ones((4, 3)), verbose=0)
    if path.endswith(".keras"):  # Keras 3.15 itself cannot go on training a model from .h5
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    found[path] = [type(model.optimizer).__name__, int(model.optimizer.iterations)]
print(json.dumps(found))
"""


def test_files_load_where_horovod_is_not_installed(tmp_path: Path) -> None:
    names = ["sgd", "adam", "loss scale"]
    paths = [str(tmp_path / f"{n}.{ending}") for n in names for ending in ("keras", "h5")]
    for path in paths:
        trained(hvd.DistributedOptimizer(OPTIMIZERS[Path(path).stem]())).save(path)
    ran = subprocess.run(
        [sys.executable, "-c", LOAD_PLAIN, *paths], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    kinds = {"sgd": "SGD", "adam": "Adam", "loss scale": "LossScaleOptimizer"}
    for path, (kind, iterations) in found.items():
        assert kind == kinds[Path(path).stem]
        assert iterations == 5 or path.endswith(".h5")


def test_mixed_precision_model(tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="mixed_float16")])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam()),
        keras.losses.MeanSquaredError(),
        jit_compile=False,
    )
    train(model)
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras")
    assert is_distributed(loaded.optimizer)
    assert state(loaded.optimizer) == state(model.optimizer)


def test_loading_arguments(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    model.save(path)
    loaded = hvd.load_model(path, compression=hvd.Compression.fp16)
    assert loaded.optimizer.hvdtrain_reducer.reduction.compression is hvd.Compression.fp16
    with pytest.raises(UsageError, match="legacy_opts"):
        hvd.load_model(path, legacy_opts=True)
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).save(path)
    assert getattr(hvd.load_model(path), "optimizer", None) is None


@pytest.mark.parametrize("ending", ["keras", "h5"])
@pytest.mark.parametrize("averaged", [False, True])
def test_a_loaded_model_accumulates_as_before(ending: str, averaged: bool, tmp_path: Path) -> None:
    """Horovod's default is to add up the gradients of backward_passes_per_step batches."""
    passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": averaged}
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), op=hvd.Sum, **passes))
    path = tmp_path / f"model.{ending}"
    model.save(path)
    loaded = hvd.load_model(path)
    assert loaded.optimizer.hvdtrain_reducer.reduction.op == hvd.Sum
    train(model)
    train(loaded)
    assert [w.tolist() for w in loaded.get_weights()] == [w.tolist() for w in model.get_weights()]


@pytest.mark.parametrize("name", ["sgd", "adam", "registered", "loss scale"])
def test_copies(name: str) -> None:
    model = trained(hvd.DistributedOptimizer(OPTIMIZERS[name]()))
    for twin in (copy.deepcopy(model.optimizer), pickle.loads(pickle.dumps(model.optimizer))):
        assert isinstance(twin, type(OPTIMIZERS[name]()))
        assert twin.get_config() == model.optimizer.get_config()
    again = type(model.optimizer).from_config(model.optimizer.get_config())
    assert is_distributed(again) or name == "loss scale"  # which makes its inner optimizer anew
    assert again.get_config() == model.optimizer.get_config()
    clone = keras.models.clone_model(model)
    clone.compile(again, keras.losses.MeanSquaredError(), jit_compile=False)
    train(clone)
    assert int(again.iterations) == 4


def test_copies_reduce_as_well() -> None:
    """A copy that forgot to reduce would train each rank its own model."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=hvd.Compression.fp16)
    optimizer.build([keras.Variable([1.0])])
    twin = copy.deepcopy(optimizer)
    assert is_distributed(twin)
    assert twin.hvdtrain_reducer.reduction == optimizer.hvdtrain_reducer.reduction
    assert state(twin) == state(optimizer)


@pytest.mark.parametrize("name", ["adam", "loss scale"])
def test_copies_of_a_model_reduce_as_well(name: str) -> None:
    compression = hvd.Compression.fp16
    model = trained(hvd.DistributedOptimizer(OPTIMIZERS[name](), compression=compression))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_distributed(twin.optimizer)
        reduction = inner_of(twin.optimizer).hvdtrain_reducer.reduction
        assert reduction.compression is hvd.Compression.fp16
        assert reduction.process_set.is_global()
        for one, same in zip(twin.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, same)
        train(twin)
    plain = trained(OPTIMIZERS[name]())
    assert not is_distributed(copy.deepcopy(plain).optimizer)
