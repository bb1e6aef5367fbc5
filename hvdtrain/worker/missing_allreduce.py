"""Detect jobs whose ranks never exchange anything, so that each trains its own model.

That happens to an ordinary Keras script started on several ranks, and to one whose optimizer is wrapped by Horovod's
own Keras module, which does nothing on Keras 3. Both end without an error, so users are warned as early as it is
certain.

This module imports neither Keras nor Horovod: it observes the script's imports, optimizers and collectives.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvdtrain.rank_variables import rank_of, size_of
from hvdtrain.worker.import_hooks import Hooks

_OPERATIONS = "horovod.tensorflow.mpi_ops"
_LOOPS = "keras.src.callbacks.callback_list"
_OPTIMIZERS = {
    "keras.src.optimizers.base_optimizer": ("BaseOptimizer", "apply"),
    "tf_keras.src.optimizers.optimizer": ("Optimizer", "apply_gradients"),
}
"""Methods through which each step of any loop passes, `fit`'s or a script's own: module -> (class, method)."""
_HOROVODS_KERAS = ("horovod.tensorflow.keras", "horovod.keras")
_OTHER_WAYS = ("mpi4py.MPI", "horovod.torch")
"""Modules with which a script may combine values without Horovod for TensorFlow."""

_CHANGE = """\
To train one model on all of them, use hvdtrain.Trainer, or with model.fit:

    import hvdtrain.keras as hvd
    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), ...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])"""


class Watch:
    """Observes the script's imports by means of `hooks`, for `import_hooks.on_import`.

    Args:
        say: Prints a warning.

    Attributes:
        trained: Whether the script has applied gradients.
        settled: Whether the script has called a collective that combines values over ranks, or a warning was printed.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.trained = False
        self.settled = False

    @property
    def hooks(self) -> Hooks:
        """Hooks for the modules with which a script communicates or trains."""
        return {
            _OPERATIONS: lambda module: _note_calls(module.MPI_LIB, self),
            _LOOPS: self._look_at_training,
            **dict.fromkeys(_OPTIMIZERS, self._look_at_steps),
            **dict.fromkeys(_HOROVODS_KERAS, self._look_at),
        }

    def _look_at(self, module: ModuleType) -> None:
        name = module.__name__
        if is_keras_3():
            self.settled = True
            self._say(
                f"{name} does nothing on Keras 3: its DistributedOptimizer does not average "
                "gradients, so every rank trains its own model. Change one line:\n\n    import "
                f"hvdtrain.keras as hvd\n\nin place of import {name} as hvd"
            )

    def _look_at_training(self, module: ModuleType) -> None:
        """Warn at the start of Keras's fit: without Horovod its first step is wrong, maybe hours before its end."""
        begin = module.CallbackList.on_train_begin

        @functools.wraps(begin)
        def tell(*args: Any, **kwargs: Any) -> Any:
            if _OPERATIONS not in sys.modules and not self._is_sound():
                self.settled = True
                self._say(
                    f"this script does not use Horovod: each of the {size_of(os.environ)} ranks trains its own model. "
                    f"{_CHANGE}"
                )
            return begin(*args, **kwargs)

        module.CallbackList.on_train_begin = tell

    def _look_at_steps(self, module: ModuleType) -> None:
        name, method = _OPTIMIZERS[module.__name__]
        optimizer = getattr(module, name)
        apply = getattr(optimizer, method)

        @functools.wraps(apply)
        def note(*args: Any, **kwargs: Any) -> Any:
            self.trained = True
            _remove(optimizer, method, note, apply)
            return apply(*args, **kwargs)

        setattr(optimizer, method, note)

    def _is_sound(self) -> bool:
        return self.settled or any(name in sys.modules for name in _OTHER_WAYS)

    def complaint(self) -> str:
        """Return the warning for the end of a script that succeeded; empty if there is none."""
        if self._is_sound() or not self.trained:
            return ""
        return f"the {size_of(os.environ)} ranks never exchanged a value: each of them trained its own model. {_CHANGE}"


def watch() -> Watch | None:
    """Return a Watch; None on all ranks except the first, and in jobs with one rank."""
    if size_of(os.environ) == 1 or rank_of(os.environ):
        return None
    return Watch(say)


def say(text: str) -> None:
    """Print a warning on standard error."""
    print(f"hvdtrain: warning: {text}\n", file=sys.stderr, flush=True)


def is_keras_3() -> bool:
    """Return whether `keras`, and with it tf.keras, is Keras 3 or later."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        return False
    try:
        return int(importlib.metadata.version("keras").split(".")[0]) >= 3
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def _note_calls(operations: Any, watching: Watch) -> None:
    """Record the first call of an operation that combines values over ranks: all except broadcast."""
    names = [
        f"horovod_{group}{kind}"
        for group in ("", "grouped_")
        for kind in ("allreduce", "allgather", "reducescatter", "alltoall")
    ]
    originals = {name: getattr(operations, name) for name in names if hasattr(operations, name)}

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            watching.settled = True
            for name, operation in originals.items():
                _remove(operations, name, noted[name], operation)
            return original(*args, **kwargs)

        return note

    noted = {name: noting(original) for name, original in originals.items()}
    for name, note in noted.items():
        setattr(operations, name, note)


def _remove(owner: Any, name: str, note: Any, original: Any) -> None:
    """Put `original` in the place of `note`, unless something else wraps it by now."""
    if getattr(owner, name) is note:
        setattr(owner, name, original)
