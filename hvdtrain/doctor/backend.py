"""Is Keras set to TensorFlow? Keras reads its backend from the environment, else from a file in the home folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.doctor.finding import Finding, fail, ok, warn

NAME = "Keras backend"


def look_at_backend(environ: Mapping[str, str], home: Path) -> Sequence[Finding]:
    """KERAS_BACKEND, keras.json and TF_USE_LEGACY_KERAS."""
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        seen = "TF_USE_LEGACY_KERAS makes tf.keras Keras 2"
        fix = "unset TF_USE_LEGACY_KERAS; with it only hvdtrain.keras works, by Horovod's own, and not the Trainer"
        return [warn(NAME, seen, fix)]
    named = environ.get("KERAS_BACKEND")
    if named:
        if named == "tensorflow":
            return [ok(NAME, "tensorflow")]
        return [fail(NAME, f"KERAS_BACKEND is {named}", "export KERAS_BACKEND=tensorflow")]
    file = Path(environ.get("KERAS_HOME") or home / ".keras") / "keras.json"
    backend = _backend_of(file)
    if backend == "tensorflow":
        return [ok(NAME, "tensorflow")]
    return [
        fail(NAME, f"{backend}, in {file}", "export KERAS_BACKEND=tensorflow, or edit the file")
    ]


def _backend_of(file: Path) -> str:
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError):
        return "tensorflow"  # Keras's own default, also for a file that it cannot read.
    backend = settings.get("backend") if isinstance(settings, dict) else None
    return backend if isinstance(backend, str) else "tensorflow"
