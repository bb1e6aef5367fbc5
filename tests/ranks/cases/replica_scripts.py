"""The scripts, unchanged, under each synchronous strategy of this process."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import stand_in

from hvdtrain.strategy_names import STRATEGY

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
stand_in.install()


def run(script: str, strategy: str, *arguments: str) -> dict[str, Any]:
    """Run a script as its own program; return the accuracy that it prints, and the weights it leaves."""
    before, sys.argv = sys.argv, [script, *arguments]
    os.environ[STRATEGY] = strategy
    printed = io.StringIO()
    kept: list[keras.Model] = []
    build = keras.Model.compile

    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        kept.append(self)
        build(self, *args, **kwargs)

    try:
        # Removed afterwards: with a compile of its own, keras.Model would load models without compiling them.
        with (
            mock.patch.object(keras.Model, "compile", compile),
            contextlib.redirect_stdout(printed),
        ):
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    finally:
        sys.argv = before
        keras.config.set_dtype_policy("float32")
    (accuracy,) = re.findall(r"validation accuracy (\d\.\d+)", printed.getvalue())
    return {
        "accuracy": float(accuracy),
        "weights": [v.numpy() for v in kept[-1].trainable_variables],
        "model": kept[-1],
    }


def apart(script: str, *arguments: str) -> dict[str, Any]:
    one = run(script, "horovod", *arguments)
    found = {}
    for strategy in ("central-storage", "tpu"):
        other = run(script, strategy, *arguments)
        pairs = zip(one["weights"], other["weights"], strict=True)
        found[strategy] = {
            "weights": max(float(np.abs(a - b).max()) for a, b in pairs),
            "accuracy": abs(one["accuracy"] - other["accuracy"]),
        }
    return found | {"accuracy": one["accuracy"]}


def case_mnist() -> dict[str, Any]:
    return apart("train_mnist.py", "--epochs", "1")


def case_tabular() -> dict[str, Any]:
    return apart("train_tabular.py", "--rows", "16384", "--epochs", "1", "--batch-size", "999")


def case_tpu() -> dict[str, Any]:
    """scripts/train_tpu.py, which names the strategy itself; its model in plain Keras."""
    with tempfile.TemporaryDirectory() as folder:
        found = run("train_tpu.py", "horovod", "--epochs", "3", "--run-dir", folder)
        loaded = keras.saving.load_model(Path(folder) / "model.keras")
        lines = (Path(folder) / "metrics.csv").read_text().splitlines()
    pairs = zip(found["weights"], loaded.trainable_variables, strict=True)
    return {
        "accuracy": found["accuracy"],
        "loaded": max(float(np.abs(a - b.numpy()).max()) for a, b in pairs),
        "compute": found["model"].layers[1].compute_dtype,
        "copies": len(found["model"].trainable_variables[0].value.values),
        "epochs": len(lines) - 1,
    }
