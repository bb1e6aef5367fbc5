"""A training whose loss becomes nan or inf: it ends, skips the step, or goes back to a checkpoint, on all ranks alike.

The step, the rank whose share of the batch was the first, and its examples are named in each case.
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
from hvdtrain.collectives.consistency import any_rank, on_first
from hvdtrain.collectives.finite import ADVICE, not_finite
from hvdtrain.data import KnownSource, Part, Share, Source
from hvdtrain.errors import DivergedError, UsageError, warn_user
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.skipped_steps import SkippedSteps, skipped_steps_of
from hvdtrain.strategies.strategy import Logs, Strategy
from hvdtrain.trainer.looks import Looks
from hvdtrain.trainer.resume import SavedFit
from hvdtrain.trainer.run_dir import RunDir

POLICIES = ("warn", "stop", "skip", "rewind")
FILE = "diverged.jsonl"
SHOWN = 8
"""Examples in the message; the file has all."""
MOST_SKIPPED = 50
"""Steps in a row; loss scaling may skip about twenty until it has found its scale."""
MOST_REWINDS = 3
"""To the same checkpoint."""

Rewind = Callable[[int, bool], int | None]
"""Takes the epoch, counted from 0, and whether it ends; returns the number of steps of the checkpoint, None if there is
none."""


@dataclass(frozen=True)
class Divergence:
    """The first loss that was not finite.

    Attributes:
        loss: "nan", "inf" or "-inf".
        epoch, step: counted from 1; of several steps that ran at once the last one.
        rank: on whose share of the batch; the lowest of several.
        examples: in that share, as positions in the data, counted from 0; empty where data has none (a stream).
        batch: the part of the global batch, begin and end, counted from 0.
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
    """A step whose losses, which need not be computed yet, nobody has looked at."""

    epoch: int
    step: int
    losses: list[Any]
    begin: int
    end: int

    def broken(self) -> str | None:
        """The first loss that is not finite."""
        values = (float(np.sum(np.asarray(loss, np.float64))) for loss in self.losses)
        return next((str(value) for value in values if not np.isfinite(value)), None)


class LossWatch:
    """Looks at the losses of all steps, about once a second, and keeps to the policy.

    Args:
        policy: "stop", "skip" or "rewind".
        source: the training data.
        part: of it, that is this rank's.
        run_dir: where `FILE` is written; None: nowhere.
        skipped: counts the steps that the optimizer leaves out, under the policy "skip".
        rewind: sets the model to the newest checkpoint; used by the policy "rewind" alone.
        ranks: that train together.
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
        self._told_skipped = 0
        self._spoilt: int | None = None  # The epoch whose running mean is nan until it ends.
        self._rewind = rewind
        self._rewound: list[int] = []  # To which step, each time.
        self._ranks = ranks
        self._looks = Looks("losses", ranks)
        self._steps = self._epoch = self._step = 0
        self._recent: list[tuple[int, _Step]] = []

    def add(self, epoch: int, step: int, steps: int, logs: Logs, share: Share) -> None:
        """Note the losses of `steps` steps that ran at once; `epoch` and `step`, the last one, are counted from 0."""
        self._steps += steps
        self._epoch, self._step = epoch, step
        losses = [value for name, value in logs.items() if name.endswith("loss")]
        noted = _Step(epoch, step, losses, share.offset, share.offset + share.examples)
        self._recent.append((self._steps, noted))

    def look(self, now: bool = False, epoch_ends: bool = False) -> bool:
        """Look, if it is time; return whether the model went back to a checkpoint. A collective at some steps.

        Args:
            now: in any case.
            epoch_ends: as `now`, and no step of the epoch follows.

        Raises:
            DivergedError: on all ranks: a loss of one of them was not finite, and the policy is to stop, or nothing
                helps.
        """
        if not (now or epoch_ends or self._looks.due(self._steps)):
            return False
        recent, self._recent = self._recent, []
        each = (
            (number, step, step.broken()) for number, step in recent if step.epoch != self._spoilt
        )
        mine = next((one for one in each if one[2] is not None), None)
        first = -np.inf if mine is None else -mine[0]
        (latest,) = self._looks.together(self._steps, [first])
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
        """See to it that no weight, and no loss so far, of any rank is nan or inf. A collective.

        Args:
            variables: this rank's weights.
            when: for the message, such as "after epoch 3".
            epoch_ends: see `look`.

        Raises:
            DivergedError: on all ranks: one is, and the policy is not to rewind, or that did not help.
        """
        self.look(now=True, epoch_ends=epoch_ends)  # Which tells more.
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
        """Say which steps were skipped; the counts are the same on all ranks.

        Args:
            skipped: counts them.
            what: was found in the losses; empty: nothing.
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
        """Add a line to the file; return its name, empty if there is none: a full disk must not hide what happened."""
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
    """Return `on_nan`; raise UsageError unless it is a policy, and `strategy` can keep to it.

    Args:
        saves: whether there are checkpoints.
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
    if on_nan == "skip" and strategy.position.mesh.pipeline > 1:
        raise UsageError(
            "on_nan='skip' does not work with pipeline stages: choose 'stop' or 'rewind'"
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
    saved: SavedFit | None,
) -> LossWatch | None:
    """Return the LossWatch of a training of `model` on `source`; None: nobody looks ("warn")."""
    if policy == "warn":
        return None
    rewind = None if saved is None else partial(saved.rewind, model)
    return LossWatch(policy, source, part, run_dir, skipped_steps_of(model), rewind)
