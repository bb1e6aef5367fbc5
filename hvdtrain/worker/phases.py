"""Track a script's phases for its heartbeat, whether it trains with Keras's fit, the Trainer, or a loop of its own.

Horovod's init, the callbacks of all Keras loops, saving, and collectives outside tf.function pass through a few
functions of Horovod and Keras, which are wrapped when the script has imported them. A step that is a tf.function of the
script's own is not seen: until the next mark, the rank remains in its previous phase.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvdtrain.rank_variables import is_elastic
from hvdtrain.worker.elastic_place import Commits, ask_for_changes, place_after_arrival
from hvdtrain.worker.heartbeat import Phase, beat, current, in_phase
from hvdtrain.worker.import_hooks import Hooks

COLLECTIVES = tuple(
    f"horovod_{kind}"
    for kind in (
        *("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "alltoall"),
        *("reducescatter", "grouped_reducescatter", "broadcast", "broadcast_inplace"),
        *("broadcast_inplace_resource", "join"),
    )
)
"""Functions of Horovod's TensorFlow extension that wait for other ranks."""


def _follow_init(module: ModuleType) -> None:
    """horovod.common.basics: all of Horovod's front ends start here; in an elastic job, again for each new rank."""
    basics = module.HorovodBasics
    start = basics.init

    @functools.wraps(start)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        elastic = is_elastic(os.environ)
        with in_phase("init", waiting=True):
            if elastic and not self.is_initialized():
                os.environ.update(place_after_arrival(os.environ))
            result = start(self, *args, **kwargs)
        beat("script", rank=self.rank() if elastic else None)
        return result

    basics.init = init


def _follow_states(module: ModuleType) -> None:
    """horovod.common.elastic: after a failure a worker continues from what it has committed."""
    commit, on_reset, commits = module.State.commit, module.State.on_reset, Commits()

    @functools.wraps(commit)
    def follow(self: Any) -> None:
        commit(self)
        if current().rank == 0:
            commits.note()

    @functools.wraps(on_reset)
    def reset(self: Any) -> None:
        on_reset(self)  # It discards what the launcher has told meanwhile.
        if current().rank == 0:
            ask_for_changes()

    module.State.commit, module.State.on_reset = follow, reset


def _follow_collectives(module: ModuleType) -> None:
    """horovod.tensorflow.mpi_ops: an eager collective returns when all ranks have joined it."""
    import tensorflow as tf

    def follow(kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not tf.executing_eagerly():
                return collective(*args, **kwargs)
            words = (kind.removeprefix("horovod_").partition("_inplace")[0], kwargs.get("name"))
            with in_phase(current().phase, " ".join(filter(None, words)), waiting=True):
                return collective(*args, **kwargs)

        return call

    for kind in COLLECTIVES:
        if hasattr(module.MPI_LIB, kind):
            setattr(module.MPI_LIB, kind, follow(kind, getattr(module.MPI_LIB, kind)))


def _follow_loops(module: ModuleType) -> None:
    """keras.src.callbacks.callback_list: called by fit, evaluate, predict and the Trainer."""
    for hook, (before, after) in _LOOP_PHASES.items():
        _wrap(module.CallbackList, hook, before, after)


_LOOP_PHASES: dict[str, tuple[Phase, Phase]] = {
    "on_train_begin": ("callbacks", "input"),
    "on_epoch_begin": ("callbacks", "input"),
    "on_train_batch_begin": ("callbacks", "training"),
    "on_train_batch_end": ("callbacks", "input"),
    "on_epoch_end": ("callbacks", "input"),
    "on_train_end": ("callbacks", "script"),
    "on_test_begin": ("evaluating", "evaluating"),
    "on_test_batch_begin": ("evaluating", "evaluating"),
    "on_test_batch_end": ("evaluating", "evaluating"),
    "on_test_end": ("evaluating", "callbacks"),
    "on_predict_begin": ("predicting", "predicting"),
    "on_predict_batch_begin": ("predicting", "predicting"),
    "on_predict_batch_end": ("predicting", "predicting"),
    "on_predict_end": ("predicting", "script"),
}
"""Keras callback method -> the phases during it and after it."""


def _wrap(callbacks: Any, hook: str, before: Phase, after: Phase) -> None:
    told = getattr(callbacks, hook)
    counts = hook.endswith("batch_begin")

    @functools.wraps(told)
    def tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = args[0] if counts and args and isinstance(args[0], int) else None
        beat(before, step)
        result = told(self, *args, **kwargs)
        beat(after, step)
        return result

    setattr(callbacks, hook, tell)


def _follow_saving(module: ModuleType) -> None:
    """keras.src.saving.saving_api: all ways of saving a model or its weights."""

    def follow(save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def call(*args: Any, **kwargs: Any) -> Any:
            with in_phase("saving"):
                return save(*args, **kwargs)

        return call

    for name in ("save_model", "save_weights"):
        setattr(module, name, follow(getattr(module, name)))


def _once(follow: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def follow_once(module: ModuleType) -> None:
        if not hasattr(module, _FOLLOWED):
            setattr(module, _FOLLOWED, True)
            follow(module)

    return follow_once


_FOLLOWED = "_hvdtrain_follows"
HOOKS: Hooks = {
    "horovod.common.basics": _once(_follow_init),
    "horovod.common.elastic": _once(_follow_states),
    "horovod.tensorflow.mpi_ops": _once(_follow_collectives),
    "keras.src.callbacks.callback_list": _once(_follow_loops),
    "keras.src.saving.saving_api": _once(_follow_saving),
}


def follow_imported() -> None:
    """Track a rank that was not started by `hvdtrain run`: hook the modules that it has already imported."""
    for name, follow in HOOKS.items():
        if name in sys.modules:
            follow(sys.modules[name])
