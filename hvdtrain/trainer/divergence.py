"""Handles a loss or weight that becomes nan or inf: training stops, skips the step, or returns to a checkpoint.

All ranks do the same. The message names the step, the lowest rank with such a loss, and the examples in its share of
the batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.collectives.consistency import any_rank
from hvdtrain.collectives.finite import ADVICE, not_finite
from hvdtrain.collectives.first_rank import on_first
from hvdtrain.data import KnownSource, Part, Share, Source
from hvdtrain.errors import DivergedError, UsageError, warn_user
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.skipped_steps import SkippedSteps, skipped_steps_of
from hvdtrain.strategies.strategy import Logs, Strategy
from hvdtrain.trainer.periodic_check import PeriodicCheck
from hvdtrain.trainer.resume import FitCheckpoints
from hvdtrain.trainer.run_dir import RunDir

POLICIES = ("warn", "stop", "skip", "rewind")
FILE = "diverged.jsonl"
SHOWN = 8
"""Number of examples in the message; the file lists all."""
MOST_SKIPPED = 50
"""Maximum number of steps skipped in a row; loss scaling may skip about twenty until it has found its scale."""
MOST_REWINDS = 3
"""Maximum number of returns to the same checkpoint."""

Rewind = Callable[[int, bool], int | None]
"""Restores the newest checkpoint, given the epoch, from 0, and whether it ends; see `FitCheckpoints.rewind`."""


@dataclass(frozen=True)
class Divergence:
    """The first loss that was not finite.

    Attributes:
        loss: "nan", "inf" or "-inf".
        epoch: Number of the epoch, from 1.
        step: Number of the step in the epoch, from 1; the last one of steps that ran together (steps_per_execution).
        rank: Rank whose share of the batch gave this loss; the lowest, if there were several.
        examples: Indices of the examples of that share in the data, from 0; empty if the data has no indices (a
            stream).
        batch: Begin and end of that share in the global batch, from 0.
    """

    loss: str
    epoch: int
    step: int
    rank: int
    examples: list[int]
    batch: tuple[int, int]

    def __str__(self) -> str:
        begin, end = self.batch
        if self.examples:
            shown = ", ".join(map(str, self.examples[:SHOWN]))
            which = f"examples {shown}{', ...' if len(self.examples) > SHOWN else ''} of the data"
        else:
            which = f"examples {begin} to {end - 1} of the global batch"
        return (
            f"the loss became {self.loss} in step {self.step} of epoch {self.epoch} on rank {self.rank}, which had "
            f"{which}"
        )


@dataclass(frozen=True)
class _Step:
    """A step whose losses have not been checked yet; they may still be computed in the background."""

    epoch: int
    step: int
    losses: list[Any]
    begin: int
    end: int

    def broken(self) -> str | None:
        """Return the first loss that is not finite, as text; None if all are."""
        values = (float(np.sum(np.asarray(loss, np.float64))) for loss in self.losses)
        return next((str(value) for value in values if not np.isfinite(value)), None)


class LossWatch:
    """Checks the losses of all steps about once a second, and applies the `on_nan` policy.

    Args:
        policy: "stop", "skip" or "rewind".
        source: Training data.
        part: Share of each global batch that this rank reads.
        run_dir: Folder in which `FILE` is written; None: nowhere.
        skipped: Counter of the steps that the optimizer skipped; None unless the policy is "skip".
        rewind: Function that restores the newest checkpoint; only used by the policy "rewind".
        ranks: Ranks that train together.
    """

    def __init__(
        self,
        policy: str,
        source: Source,
        part: Part,
        run_dir: RunDir | None,
        skipped: SkippedSteps | None = None,
        rewind: Rewind | None = None,
        ranks: Communicator = ALL_RANKS,
    ) -> None:
        self._policy = policy
        self._source = source
        self._part = part
        self._run_dir = run_dir
        self._skipped = skipped
        # An earlier fit may have skipped some.
        self._told_skipped = 0 if skipped is None else skipped.count
        self._spoilt: int | None = None  # Epoch whose running mean of the loss stays nan.
        self._rewind = rewind
        self._rewound: list[int] = []  # Step of the checkpoint restored each time.
        self._ranks = ranks
        self._check = PeriodicCheck("losses", ranks)
        self._steps = self._epoch = self._step = 0
        self._recent: list[tuple[int, _Step]] = []

    def add(self, epoch: int, step: int, steps: int, logs: Logs, share: Share) -> None:
        """Record the losses of `steps` steps that ran together.

        Args:
            epoch: Index of the epoch, from 0.
            step: Index of the last of these steps in the epoch, from 0.
            steps: Number of these steps.
            logs: Logs of the last step; every value whose name ends in "loss" is checked.
            share: This rank's share of the batch of the last step.
        """
        self._steps += steps
        self._epoch, self._step = epoch, step
        losses = [value for name, value in logs.items() if name.endswith("loss")]
        noted = _Step(epoch, step, losses, share.offset, share.offset + share.examples)
        self._recent.append((self._steps, noted))

    def look(self, now: bool = False, epoch_ends: bool = False) -> bool:
        """Check the recorded losses if a check is due; return whether the model was restored from a checkpoint.

        A collective at steps on which all ranks agree.

        Args:
            now: Whether to check even if no check is due; the same on all ranks.
            epoch_ends: Whether this is the end of an epoch; also checks in any case.

        Raises:
            DivergedError: On all ranks, if a loss is not finite and the policy is "stop", or if skipping or rewinding
                has not helped.
        """
        if not (now or epoch_ends or self._check.due(self._steps)):
            return False
        recent, self._recent = self._recent, []
        each = (
            (number, step, step.broken()) for number, step in recent if step.epoch != self._spoilt
        )
        mine = next((one for one in each if one[2] is not None), None)
        first = -np.inf if mine is None else -mine[0]
        (latest,) = self._check.reduce_max(self._steps, [first])
        what = ""
        if latest != -np.inf:
            theirs = None
            if mine is not None and mine[0] == -latest:
                theirs = asdict(self._found(mine[1], str(mine[2])))
            everyone = self._ranks.exchange(theirs, "diverged")
            found = Divergence(**next(one for one in everyone if one is not None))
            written = on_first(lambda: self._write(found), FILE, self._ranks)
            what = f"{found}{f' (all are in {written!r})' if written else ''}"
        if self._skipped is not None:
            self._after_skipping(self._skipped, what)
        elif what:
            self._end_or_rewind(what, epoch_ends)
            return True
        return False

    def require_finite(self, variables: Iterable[Any], when: str, epoch_ends: bool) -> None:
        """Check the recorded losses, and the weights of every rank, for nan and inf. A collective.

        Args:
            variables: Weights of this rank.
            when: Time for the message, such as "after epoch 3".
            epoch_ends: Whether this is the end of an epoch; see `look`.

        Raises:
            DivergedError: On all ranks, if a loss or weight is not finite and the policy is not "rewind", or rewinding
                has not helped.
        """
        self.look(now=True, epoch_ends=epoch_ends)  # Its message tells more.
        broken = not_finite(variables)
        if not any_rank(bool(broken), "weights_diverged", self._ranks):
            return
        name = next(one for one in self._ranks.exchange(broken[:1], "diverged") if one)[0]
        self._end_or_rewind(f"{name!r} has become nan or inf {when}", epoch_ends)

    def _end_or_rewind(self, what: str, epoch_ends: bool) -> None:
        if self._policy != "rewind" or self._rewind is None:
            raise DivergedError(
                f"{what}, and training has stopped (on_nan={self._policy!r}). {ADVICE.capitalize()}"
            )
        steps = self._rewind(self._epoch, epoch_ends)
        if steps is None:
            raise DivergedError(
                f"{what}, and there is no checkpoint to go back to (on_nan='rewind'): training has stopped. "
                f"{ADVICE.capitalize()}"
            )
        self._rewound.append(steps)
        if self._rewound.count(steps) > MOST_REWINDS:
            raise DivergedError(
                f"{what}, again after {MOST_REWINDS} returns to the checkpoint of step {steps} (on_nan='rewind'): "
                f"training has stopped. {ADVICE.capitalize()}"
            )
        self._warn(
            f"{what}. The checkpoint of step {steps} was restored, and training continues with the next batch "
            "(on_nan='rewind')"
        )

    def _after_skipping(self, skipped: SkippedSteps, what: str) -> None:
        """Warn of skipped steps; their counts are the same on all ranks.

        Args:
            skipped: Counter of the skipped steps.
            what: Description of the first loss that was not finite; "" if all were.

        Raises:
            DivergedError: If too many steps in a row were skipped.
        """
        new, self._told_skipped = skipped.count - self._told_skipped, skipped.count
        if what and not new:
            self._spoilt = self._epoch
            self._warn(
                f"{what}, and the step was not skipped, as its gradients are finite (on_nan='skip'): let train_step "
                "pass its loss through self.optimizer.scale_loss"
            )
            return
        until = f"until step {self._step + 1} of epoch {self._epoch + 1}"
        is_usual = skipped.are_usual and not what
        what = what or f"gradients became nan or inf {until}"
        if skipped.in_a_row >= MOST_SKIPPED:
            raise DivergedError(
                f"{what}, and the last {skipped.in_a_row} steps were all skipped (on_nan='skip'): training has "
                f"stopped. {ADVICE.capitalize()}"
            )
        if new and not is_usual:
            steps = "One step was" if new == 1 else f"{new} steps were"
            self._warn(
                f"{what}. {steps} skipped since the last warning, without changing the model (on_nan='skip')"
            )

    def _warn(self, text: str) -> None:
        if self._ranks.rank() == 0:
            warn_user(f"{text[0].upper()}{text[1:]}")

    def _found(self, step: _Step, loss: str) -> Divergence:
        source, part = self._source, self._part
        examples: list[int] = []
        if isinstance(source, KnownSource) and step.end > step.begin:
            examples = source.numbers(step.epoch, step.step, part.index, part.count)
        batch = (step.begin, step.end)
        return Divergence(loss, step.epoch + 1, step.step + 1, self._ranks.rank(), examples, batch)

    def _write(self, found: Divergence) -> str:
        """Append a line to `FILE` and return its path; "" without run_dir or if it cannot be written.

        A full disk must not hide the divergence.
        """
        if self._run_dir is None:
            return ""
        path = self._run_dir.path / FILE
        try:
            self._run_dir.keep()
            with path.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        except OSError:
            return ""
        return str(path)


def checked_policy(on_nan: str, strategy: Strategy, saves: bool) -> str:
    """Return the user's `on_nan`, after checking that it works with `strategy`; `saves`: the Trainer has checkpoints.

    Raises:
        UsageError: If there is no such policy, or it does not work with the strategy or without checkpoints.
    """
    if on_nan not in POLICIES:
        raise UsageError(f"on_nan={on_nan!r}: choose one of {', '.join(map(repr, POLICIES))}")
    if on_nan == "warn":
        return on_nan
    if not isinstance(strategy, HorovodStrategy):
        raise UsageError(
            f"on_nan={on_nan!r} works with strategy='horovod' (here: {strategy.name}): leave it out, and use "
            "keras.callbacks.TerminateOnNaN"
        )
    if on_nan == "skip" and not strategy.runner.skips_steps:
        raise UsageError(
            "on_nan='skip' does not work with pipeline stages and micro-batches: choose 'stop' or 'rewind'"
        )
    if on_nan == "rewind" and not saves:
        raise UsageError(
            "on_nan='rewind' goes back to the newest checkpoint: pass checkpoints=hvdtrain.Checkpoints(...)"
        )
    return on_nan


def loss_watch(
    policy: str,
    source: Source,
    part: Part,
    run_dir: RunDir | None,
    model: keras.Model,
    saved: FitCheckpoints | None,
) -> LossWatch | None:
    """Return the LossWatch of a fit of a compiled model, `saved` being its checkpoints; None for the policy "warn"."""
    if policy == "warn":
        return None
    rewind = None if saved is None else partial(saved.rewind, model)
    return LossWatch(policy, source, part, run_dir, skipped_steps_of(model), rewind)
