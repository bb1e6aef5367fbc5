"""Keras 2: hand over the names of Horovod's own module, which works there.

Imports no Keras: whether there is a Keras 3 to import is settled here.
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
    """Return the public names of horovod.tensorflow.keras, made for tf-keras.

    Only `init` is ours: it sets the stall check, so that a job ends in place of hanging.

    Raises:
        EngineError: tf-keras or Horovod is not installed.
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
    """Let `import keras` find `module`: Horovod's callbacks take their backend from there."""
    before = sys.modules.get("keras")
    sys.modules["keras"] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules["keras"]
        else:
            sys.modules["keras"] = before
