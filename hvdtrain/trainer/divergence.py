"""A training whose loss becomes nan or inf ends on all ranks, and tells the step, the rank and its examples."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator
from hvdtrain.collectives.consistency import any_rank, on_first
from hvdtrain.collectives.finite import ADVICE, not_finite
from hvdtrain.data import KnownSource, Part, Share, Source
from hvdtrain.errors import DivergedError, UsageError
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.strategy import Logs, Strategy
from hvdtrain.trainer.looks import Looks
from hvdtrain.trainer.run_dir import RunDir

FILE = "diverged.json"
SHOWN = 8
"""Examples in the message; the file has all."""


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
    """Looks at the losses of all steps, about once a second.

    Args:
        source: the training data.
        part: of it, that is this rank's.
        run_dir: where `FILE` is written; None: nowhere.
        ranks: that train together.
    """

    def __init__(
        self, source: Source, part: Part, run_dir: RunDir | None, ranks: Communicator = ALL_RANKS
    ) -> None:
        self._source = source
        self._part = part
        self._run_dir = run_dir
        self._ranks = ranks
        self._looks = Looks("losses", ranks)
        self._steps = 0
        self._recent: list[tuple[int, _Step]] = []

    def add(self, epoch: int, step: int, steps: int, logs: Logs, share: Share) -> None:
        """Note the losses of `steps` steps that ran at once; `epoch` and `step`, the last one, are counted from 0."""
        self._steps += steps
        losses = [value for name, value in logs.items() if name.endswith("loss")]
        noted = _Step(epoch, step, losses, share.offset, share.offset + share.examples)
        self._recent.append((self._steps, noted))

    def look(self, now: bool = False) -> None:
        """Look, if it is time or the weights are compared now. A collective at some steps.

        Raises:
            DivergedError: on all ranks: a loss of one of them was not finite.
        """
        if not (now or self._looks.due(self._steps)):
            return
        recent, self._recent = self._recent, []
        each = ((number, step, step.broken()) for number, step in recent)
        mine = next((one for one in each if one[2] is not None), None)
        first = -np.inf if mine is None else -mine[0]
        (latest,) = self._looks.together(self._steps, [first])
        if latest == -np.inf:
            return
        theirs = None
        if mine is not None and mine[0] == -latest:
            theirs = asdict(self._found(mine[1], str(mine[2])))
        everyone = self._ranks.exchange(theirs, "diverged")
        found = Divergence(**next(one for one in everyone if one is not None))
        written = on_first(lambda: self._write(found), FILE, self._ranks)
        raise DivergedError(_told(found, written))

    def require_finite(self, variables: Iterable[Any], when: str) -> None:
        """Raise DivergedError on all ranks if a weight, or a loss so far, of one of them is not finite. A collective.

        Args:
            variables: this rank's weights.
            when: for the message, such as "after epoch 3".
        """
        self.look(now=True)  # Which tells more.
        broken = not_finite(variables)
        if not any_rank(bool(broken), "weights_diverged", self._ranks):
            return
        name = next(one for one in self._ranks.exchange(broken[:1], "diverged") if one)[0]
        raise DivergedError(
            f"{name!r} has become nan or inf {when}: the training has stopped. {ADVICE.capitalize()}"
        )

    def _found(self, step: _Step, loss: str) -> Divergence:
        source, part = self._source, self._part
        examples: list[int] = []
        if isinstance(source, KnownSource) and step.end > step.begin:
            examples = source.numbers(step.epoch, step.step, part.index, part.count)
        batch = (step.begin, step.end)
        return Divergence(loss, step.epoch + 1, step.step + 1, self._ranks.rank(), examples, batch)

    def _write(self, found: Divergence) -> str:
        """Return the file's name; empty if there is none: a full disk must not hide what happened."""
        if self._run_dir is None:
            return ""
        path = self._run_dir.path / FILE
        try:
            path.write_text(json.dumps(asdict(found), indent=1) + "\n")
        except OSError:
            return ""
        return str(path)


def checked_policy(on_nan: str, strategy: Strategy) -> str:
    """Return `on_nan`; raise UsageError unless it is one, and `strategy` can keep to it."""
    if on_nan not in ("warn", "stop"):
        raise UsageError(f"on_nan={on_nan!r}: choose 'warn' or 'stop'")
    if on_nan == "stop" and not isinstance(strategy, HorovodStrategy):
        raise UsageError(
            f"on_nan='stop' works with strategy='horovod' (here: {strategy.name}): leave it out, and use "
            "keras.callbacks.TerminateOnNaN"
        )
    return on_nan


def loss_watch(on_nan: str, source: Source, part: Part, run_dir: RunDir | None) -> LossWatch | None:
    """Return what keeps to the policy `on_nan` in a training on `source`; None: nothing."""
    return LossWatch(source, part, run_dir) if on_nan == "stop" else None


def _told(found: Divergence, written: str) -> str:
    begin, end = found.batch
    if found.examples:
        shown = ", ".join(map(str, found.examples[:SHOWN]))
        which = f"examples {shown}{', ...' if len(found.examples) > SHOWN else ''} of the data"
    else:
        which = f"examples {begin} to {end - 1} of the global batch"
    return (
        f"the loss became {found.loss} in step {found.step} of epoch {found.epoch} on rank {found.rank}, and the "
        f"training has stopped (on_nan='stop'). That rank had {which}{f'; all are in {written!r}' if written else ''}. "
        f"{ADVICE.capitalize()}"
    )
