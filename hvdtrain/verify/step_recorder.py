"""Notes the state after each step of a Trainer, on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.state import TrainingState
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.metrics import read_state, write_state
from hvdtrain.data import Share
from hvdtrain.errors import UsageError
from hvdtrain.keras.writers import WRITERS
from hvdtrain.keras_internals.models import optimizers_of
from hvdtrain.messages import logger
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.step_metrics import StepLogs
from hvdtrain.strategies.strategy import Logs
from hvdtrain.trackers.tracking import Tracking
from hvdtrain.trainer.loop import Loop
from hvdtrain.trainer.plans import FitPlan
from hvdtrain.verify.model_facts import facts_of
from hvdtrain.verify.recording import RecordedStep, write_facts, write_step

_DIGEST_BYTES = 6


class EnoughSteps(BaseException):
    """Ends the script when its steps are recorded; a BaseException, so that `except Exception` does not catch it."""


@dataclass
class Recorder:
    """What this rank records, over all fits of a script.

    Attributes:
        folder: Folder to which rank 0 writes.
        most: Number of steps to record.
        backwards: Whether to turn the order of the examples of each batch round, which changes the order of sums and,
            in a model whose examples do not depend on each other, nothing else.
        steps: Number of steps recorded so far.
        trains: Whether a Trainer's fit is running.
        fits: Whether model.fit is running.
        models: Models that loops of the script's own have called.
    """

    folder: Path
    most: int
    backwards: bool
    steps: int = 0
    trains: bool = False
    fits: bool = False
    models: list[keras.Model] = field(default_factory=list)


class RecordedSteps:
    """The training steps of `loop`, which are recorded until there are enough.

    Raises:
        UsageError: The Trainer's strategy does not run on Horovod.
    """

    def __init__(self, loop: Loop, recorder: Recorder) -> None:
        if not isinstance(loop.strategy, HorovodStrategy):
            raise UsageError(
                f"strategy {loop.strategy.name} cannot be verified: the training processes do not hold its state"
            )
        self._steps = loop.steps
        self._train = loop.steps.train
        self._model = loop.model
        self._strategy: HorovodStrategy = loop.strategy
        self._recorder = recorder

    def train(self, shares: Sequence[Share]) -> Logs:
        """Train on `shares`, and record the state. A collective.

        Raises:
            EnoughSteps: The last step was recorded.
        """
        recorder = self._recorder
        if not recorder.steps:
            self._note({}, ())
        examples = [(share.offset, digests(share)) for share in shares]
        logs = self._train(list(map(turned_round, shares)) if recorder.backwards else shares)
        self._steps.finish()
        recorder.steps += len(shares)
        everyone = ALL_RANKS.exchange(examples, "verified_examples")
        self._note(logs, tuple(in_order(everyone)), shares[-1])
        if recorder.steps >= recorder.most:
            raise EnoughSteps
        return logs

    def _note(self, logs: Logs, examples: tuple[str, ...], share: Share | None = None) -> None:
        # Anew each time: a first step may create variables.
        state = TrainingState(self._model, self._strategy)
        state.own(None, logs.rules if isinstance(logs, StepLogs) else {})
        arrays = state.variables()
        shown: Logs = {}
        if share is not None:
            own = read_state(self._model.metrics)
            shown = self._strategy.logs(self._model, logs, share)
            write_state(self._model.metrics, own)
        if ALL_RANKS.rank() == 0:
            numbers = {name: float(value) for name, value in shown.items() if np.ndim(value) == 0}
            step = RecordedStep(self._recorder.steps, examples, numbers, arrays)
            write_step(self._recorder.folder, step)


@contextlib.contextmanager
def recorded_fits(recorder: Recorder) -> Iterator[None]:
    """Record the steps of every Trainer's fit in this block.

    They neither resume nor write anything else: no checkpoint, no run_dir, no tracker, no callback that writes.
    """
    fit = Loop.fit

    def recorded(loop: Loop, plan: FitPlan) -> keras.callbacks.History:
        record = replace(loop.record, run_dir=None, tracking=Tracking([], None))
        steps = RecordedSteps(loop, recorder)
        callbacks = [one for one in plan.callbacks if not isinstance(one, WRITERS)]
        recorder.trains = True
        try:
            with mock.patch.object(loop.steps, "train", steps.train):
                return fit(
                    replace(loop, record=record, saved=None, losses=None),
                    replace(plan, callbacks=callbacks, verbose=0),
                )
        finally:
            recorder.trains = False
            if loop.rank.is_first:
                facts = facts_of([loop.model], optimizers_of(loop.model))
                sync = loop.record.config["sync"]
                write_facts(recorder.folder, facts | {"warnings": told, "sync": sync})

    with _heard() as told, mock.patch.object(Loop, "fit", recorded):
        yield


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """Yield a list to which hvdtrain's warnings in this block are added, even if the script ignores warnings."""
    told: list[str] = []
    warn = warnings.warn_explicit  # Called by hvdtrain.errors.warn_user.

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        told.append(str(message))
        warn(message, *args, **kwargs)

    def hear(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            told.append(record.getMessage())
        return True

    logger().addFilter(hear)
    try:
        with mock.patch.object(warnings, "warn_explicit", note):
            yield told
    finally:
        logger().removeFilter(hear)


def digests(share: Share) -> list[str]:
    """Return a digest of each of this rank's examples, in their order; none on an idle rank."""
    leaves = [
        leaf.numpy() if hasattr(leaf, "numpy") else leaf for leaf in tf.nest.flatten(share.data)
    ]
    rows = [leaf for leaf in leaves if np.ndim(leaf)]
    return [_digest([leaf[number] for leaf in rows]) for number in range(share.examples)]


def _digest(example: Sequence[Any]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for value in example:
        array = np.asarray(value)
        digest.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return digest.hexdigest()


def in_order(everyone: Sequence[Sequence[tuple[int, list[str]]]]) -> list[str]:
    """Return the digests of whole batches from those of all ranks: by step, then by the place in the global batch.

    Args:
        everyone: For each rank and step, the offset of its examples in the global batch, and their digests. Ranks with
            parts of one model have the same examples.
    """
    batches = []
    for ranks in zip(*everyone, strict=True):
        by_offset = {offset: found for offset, found in ranks if found}
        batches.append([by_offset[offset] for offset in sorted(by_offset)])
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(batches)))


def turned_round(share: Share) -> Share:
    """Return `share` with its examples in the opposite order."""

    def turn(leaf: Any) -> Any:
        return leaf[::-1] if leaf.shape.rank else leaf

    return replace(share, data=tf.nest.map_structure(turn, share.data))
