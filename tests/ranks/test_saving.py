"""One file for all layouts of a model on four ranks, and for plain Keras where hvdtrain is not installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, Results, on_ranks

pytestmark = pytest.mark.slow
SOURCES = ("tensor-zero", "pipeline")
LOADED = ("tensor-zero-in-ranks", "tensor-zero-in-pipeline", "pipeline-in-tensor")
OUTPUTS = 1e-5
"""Logits of the size of 3, summed in another order over parts (measured: 2.4e-6)."""
TRAINED = 5e-5
"""Steps of Adam divide by small roots, which enlarges what the order of sums makes (measured: 1e-5)."""

PLAIN = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("horovod", "hvdtrain", "mpi4py"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import keras, numpy as np
folder, *names = sys.argv[1:]
RNG = np.random.default_rng(5)
X = RNG.integers(0, 18, (30, 6)).astype("int32")
Y = RNG.integers(0, 5, 30)

class Scale(keras.layers.Layer):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
    def call(self, x):
        return self.factor * x

def note(model, name):
    held = [*model.variables, *model.optimizer.variables]
    values = {v.path.replace("/", "|"): v.numpy() for v in held if "seed_generator" not in v.path}
    np.savez(f"{folder}/{name}.npz", outputs=model.predict(X, verbose=0), **values)

for name in names:
    model = keras.saving.load_model(f"{folder}/{name}.keras", custom_objects={"Scale": Scale})
    assert "accuracy" in str(model.get_compile_config()), model.get_compile_config()
    note(model, f"{name}-in-plain")
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    note(model, f"{name}-in-plain-on")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    meshes = "2,2,1;2,1,2"
    return on_ranks("saving", np=4, env={"FOLDER": str(folder), "TEST_MESHES": meshes})


@pytest.fixture(scope="module")
def plain(results: Results, folder: Path) -> Path:
    """The folder, when plain Keras has been there."""
    results.of("case_tensor_to_others"), results.of("case_pipeline_to_others")
    command = [sys.executable, "-c", PLAIN, str(folder), *SOURCES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout
    return folder


def _note(path: Path) -> dict[str, np.ndarray]:
    """Keras numbers the optimizers of a process (adam_1); what gather returns does not know their names."""
    with np.load(path) as file:
        return {re.sub(r"^adam(_\d+)?\|", "optimizer|", name): file[name] for name in file}


def distance(folder: Path, one: str, other: str) -> tuple[float, float]:
    """How far outputs, and all variables of model and optimizer, of two notes are apart."""
    a, b = _note(folder / f"{one}.npz"), _note(folder / f"{other}.npz")
    assert {key: a[key].shape for key in a} == {key: b[key].shape for key in b}
    gaps = {key: float(np.abs(a[key] - b[key]).max()) for key in a}
    outputs = gaps.pop("outputs")
    return outputs, max(gaps.values())


@pytest.mark.parametrize("source", SOURCES)
def test_plain_keras_loads_what_a_layout_saved(plain: Path, source: str) -> None:
    outputs, state = distance(plain, f"{source}-saved", f"{source}-in-plain")
    assert state == 0
    assert 0 <= outputs <= OUTPUTS


@pytest.mark.parametrize("source", SOURCES)
def test_the_layout_that_saved_trains_on_alike(plain: Path, source: str) -> None:
    _, state = distance(plain, f"{source}-saved-on", f"{source}-in-plain-on")
    assert state <= TRAINED


@pytest.mark.parametrize("loaded", LOADED)
def test_another_layout_loads_it_and_trains_on(plain: Path, loaded: str) -> None:
    source = loaded.partition("-in-")[0]
    outputs, state = distance(plain, loaded, f"{source}-in-plain")
    assert state == 0
    assert outputs <= OUTPUTS
    outputs, state = distance(plain, f"{loaded}-on", f"{source}-in-plain-on")
    assert state <= TRAINED
    # Training moved the model by far more than that.
    assert distance(plain, loaded, f"{loaded}-on")[0] > 100 * OUTPUTS


def test_checkpoints_of_all_ranks_together(results: Results, folder: Path) -> None:
    """What the last epoch wrote is compared with plain Keras above, as "pipeline"."""
    first, *others = results.of("case_pipeline_to_others")
    assert first["files"] == ["all.weights.h5"]
    assert (folder / "step3.keras").stat().st_size > 10_000
    for found in others:
        assert found["files"] == []
    for found in [first, *others]:
        saved, backup, absent, other = found["messages"]
        assert "Trainer.save" in saved
        assert "BackupAndRestore cannot" in backup
        assert "absent.keras cannot be read" in absent
        assert "belongs to another model" in other and "'embedding/embeddings'" in other
