"""Keras 2 (tf-keras): the names of Horovod's own module, which hvdtrain.keras exports in this case.

This module does not import Keras, because it decides whether Keras 3 is used at all.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvdtrain.errors import EngineError
from hvdtrain.runtime import load_horovod, start_horovod


def uses_legacy_keras() -> bool:
    """Whether tf.keras is Keras 2 (the package tf-keras) in this process."""
    return os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def horovod_names() -> dict[str, Any]:
    """Return the public names of horovod.tensorflow.keras, imported with tf-keras.

    Only `init` is replaced: it configures the stall check, so that a stalled job ends instead of hanging.

    Raises:
        EngineError: tf-keras or Horovod is not installed or does not load.
    """
    try:
        tf_keras = importlib.import_module("tf_keras")
    except ImportError as error:
        raise EngineError(
            f"TF_USE_LEGACY_KERAS is set, but tf-keras cannot be loaded ({error}): install the "
            "tf-keras of your TensorFlow's version, or unset TF_USE_LEGACY_KERAS to use Keras 3"
        ) from error
    load_horovod()
    with _keras_is(tf_keras):
        horovod = importlib.import_module("horovod.tensorflow.keras")
    names = {name: value for name, value in vars(horovod).items() if not name.startswith("_")}
    return names | {"init": start_horovod}


@contextmanager
def _keras_is(module: Any) -> Iterator[None]:
    """Let `import keras` return `module` in this block, because Horovod's callbacks import their backend from it."""
    before = sys.modules.get("keras")
    sys.modules["keras"] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules["keras"]
        else:
            sys.modules["keras"] = before
