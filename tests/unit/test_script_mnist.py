"""scripts/train_mnist.py: the file that it reads, and how it refuses a wrong one."""

import argparse
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_mnist.py"
IMAGES = np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5)
LABELS = np.arange(6, dtype=np.uint8)
GOOD = {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:2], "y_test": LABELS[:2]}


@pytest.fixture(scope="module")
def load_npz() -> Callable[[str], Any]:
    load: Callable[[str], Any] = runpy.run_path(str(SCRIPT))["load_npz"]
    return load


def test_images_become_floats_with_a_channel(
    load_npz: Callable[[str], Any], tmp_path: Path
) -> None:
    np.savez_compressed(tmp_path / "mnist.npz", **GOOD)
    x, y, xv, yv = load_npz(str(tmp_path / "mnist.npz"))
    assert (x.dtype, x.shape, xv.shape) == (np.float32, (6, 4, 5, 1), (2, 4, 5, 1))
    np.testing.assert_allclose(x[..., 0] * 255, IMAGES, rtol=1e-6)
    assert y.tolist() == list(range(6))
    assert yv.tolist() == [0, 1]


def pickled(path: Path) -> None:
    np.savez(path, **GOOD | {"y_test": np.array([{}, {}], dtype=object)})


def truncated(path: Path) -> None:
    np.savez(path, **GOOD)
    path.write_bytes(path.read_bytes()[:500])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b""), "mnist.npz is not a file like Keras's mnist.npz"),
        (lambda path: path.write_text("no arrays"), "is not a file like Keras's mnist.npz"),
        (truncated, "is not a file like Keras's mnist.npz"),
        (lambda path: np.save(path.open("wb"), IMAGES), "is not a file like Keras's mnist.npz"),
        (lambda path: np.savez(path, x_train=IMAGES), "y_train"),
        (pickled, "allow_pickle=False"),
        (lambda path: np.savez(path, **GOOD | {"x_train": LABELS}), r"not uint8 \(6,\)"),
        (lambda path: np.savez(path, **GOOD | {"y_test": LABELS}), r"\(2, 4, 5\) and \(6,\)"),
        (lambda path: np.savez(path, **GOOD | {"x_test": IMAGES[:2] / 255}), "not float64"),
    ],
)
def test_wrong_file(
    write: Callable[[Path], Any], message: str, load_npz: Callable[[str], Any], tmp_path: Path
) -> None:
    path = tmp_path / "mnist.npz"
    write(path)
    with pytest.raises(argparse.ArgumentTypeError, match=message) as caught:
        load_npz(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.slow
def test_wrong_file_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    wrong = tmp_path / "mnist.npz"
    wrong.write_text("no arrays")
    command = [sys.executable, str(SCRIPT), "--data", str(wrong)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert job.returncode == 2
    assert "Traceback" not in job.stderr
    messages = [line for line in job.stderr.splitlines() if "error: " in line]
    assert len(messages) == 1
    assert f"argument --data: {wrong} is not a file like Keras's mnist.npz" in messages[0]
