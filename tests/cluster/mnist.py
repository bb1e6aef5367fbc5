"""A short training of scripts/train_mnist.py, and its weights, to compare launches by."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from jobs import REPOSITORY, SECONDS, user_environment

MNIST = (str(REPOSITORY / "scripts/train_mnist.py"), "--epochs", "1", "--run-dir")
"""The script and its arguments; the folder of the run follows."""

TOLERANCE = 2e-6
"""The order in which four gradients are summed may differ, which changes the last bits of a sum: 45
steps of Adam at 2e-3 made 8e-8 of it, between Gloo and MPI on one machine, in weights up to 0.4."""


def weights(run_dir: Path) -> list[np.ndarray]:
    """All variables of the layers of the run's model, in the order of their names."""
    import h5py

    arrays: list[np.ndarray] = []

    def keep(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and name.startswith("layers/"):
            arrays.append(item[()])

    path = run_dir / "model.keras"
    with zipfile.ZipFile(path) as model, model.open("model.weights.h5") as file:
        h5py.File(file, "r").visititems(keep)
    assert len(arrays) == 6
    return arrays


@pytest.fixture(scope="session")
def local_weights(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """After training on four ranks of this machine."""
    folder = tmp_path_factory.mktemp("local")
    subprocess.run(
        [sys.executable, "-m", "hvdtrain.cli", "run", "-np", "4", *MNIST, "run"],
        cwd=folder,
        env=user_environment(),
        check=True,
        timeout=SECONDS,
    )
    return weights(folder / "run")
