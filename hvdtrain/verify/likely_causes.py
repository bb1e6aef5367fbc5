"""Names likely reasons why a run on several workers differs from one, as far as the recordings show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hvdtrain.verify.comparison import StepVerdict
from hvdtrain.verify.recording import GRADIENT_OF, RecordedStep, Recording

_RATE = "learning_rate"
_FILES = 3
"""Number of files in a message."""
_CLOSE = 1e-3
"""Relative difference up to which a ratio is taken for a whole number."""


@dataclass(frozen=True)
class _Case:
    """The three runs, and the verdict on the first step that is not the same."""

    one: Recording
    reordered: Recording
    several: Recording
    verdict: StepVerdict

    @property
    def steps(self) -> tuple[RecordedStep, RecordedStep]:
        """That step on one worker and on several."""
        return self.one.steps[self.verdict.step], self.several.steps[self.verdict.step]

    @property
    def before(self) -> tuple[RecordedStep, RecordedStep]:
        """The step before it."""
        last = max(0, self.verdict.step - 1)
        return self.one.steps[last], self.several.steps[last]


def likely_causes(
    one: Recording, reordered: Recording, several: Recording, verdict: StepVerdict
) -> list[str]:
    """Return sentences about the first step that is not the same, the likeliest cause first; none if nothing is known.

    Args:
        one: Run on one worker.
        reordered: The same with the examples of each batch in reverse order.
        several: Run on several workers.
        verdict: The comparison of that step.
    """
    case = _Case(one, reordered, several, verdict)
    # Each explains those after it.
    kinds = (
        *(_of_data, _of_replicas, _of_rates, _of_settings, _of_start, _of_rounds),
        *(_of_warnings, _of_scale, _of_noise, _of_gradients, _of_places, _of_files),
    )
    return next((found for kind in kinds if (found := list(kind(case)))), [])


def _of_data(case: _Case) -> Iterator[str]:
    if not case.verdict.examples:
        return
    mine, again, theirs = (
        run.steps[case.verdict.step].examples if case.verdict.step < len(run.steps) else ()
        for run in (case.one, case.reordered, case.several)
    )
    if mine != again:
        yield (
            "Two runs on one worker read different examples: the data is generated or shuffled without a seed. Seed "
            "the random generators of the script."
        )
    elif len(mine) != len(theirs):
        yield (
            f"A step has {len(mine)} examples on one worker and {len(theirs)} on several: the script's "
            "global_batch_size, or its data, depends on the number of workers."
        )
    elif sorted(mine) == sorted(theirs):
        yield (
            "The batch contains the same examples in a different order: the script shuffles depending on the rank or "
            "the number of workers."
        )
    else:
        yield (
            "Together, the workers read different examples than one worker does: the script shards or generates its "
            "data depending on the rank or the number of workers."
        )
        yield from _of_files(case)


def _of_replicas(case: _Case) -> Iterator[str]:
    apart = case.verdict.apart
    if any(_RATE in name for name in apart):
        yield (
            "The workers have different learning rates: the script, or a callback, sets the rate on some ranks only, "
            "or depending on the rank."
        )
    elif apart and not case.verdict.step:
        yield (
            f"The workers start with different values of {apart[0]}: seed them alike, or broadcast those of rank 0 "
            "before the first step, with hvdtrain.keras.broadcast_variables."
        )
    elif apart:
        yield (
            f"The workers have different values of {apart[0]} after the step: the gradients are not averaged, or only "
            "some ranks change it. Use hvdtrain.keras.DistributedOptimizer or DistributedGradientTape."
        )


def _of_rates(case: _Case) -> Iterator[str]:
    before, after = (
        {n: float(a) for n, a in step.arrays.items() if _RATE in n and not a.ndim}
        for step in case.steps
    )
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            yield (
                f"The learning rate is {before[name]:g} on one worker and {after[name]:g} on several: "
                "it is scaled by learning_rate_scaling or by the script."
            )


def _of_settings(case: _Case) -> Iterator[str]:
    one, several = (run.facts.get("settings", {}) for run in (case.one, case.several))
    names = [name for name in {**one, **several} if one.get(name) != several.get(name)]
    if len(names) > len(one) / 2:
        yield "The script builds a different model on several workers."
    elif names:
        name, more = names[0], f" ({len(names) - 1} more settings differ)" if names[1:] else ""
        yield (
            f"{name} is {one.get(name)!r} on one worker and {several.get(name)!r} on several{more}: it depends on the "
            "rank or the number of workers."
        )


def _of_start(case: _Case) -> Iterator[str]:
    if case.verdict.step:
        return
    if case.verdict.outcome == "unclear":
        yield (
            "Two runs on one worker start with different weights: the script initializes them without a seed. Pass the "
            "Trainer a function that builds the model, or call hvdtrain.init(seed=0) before building it."
        )
    else:
        yield (
            "The weights differ before the first step: the script builds a different model on several workers, or "
            "draws different random numbers before building it."
        )
        yield from _of_files(case)


def _of_rounds(case: _Case) -> Iterator[str]:
    sync = case.several.facts.get("sync")
    if sync is not None:
        yield f"sync={sync}: workers train independently between rounds, so they do not match one worker."


def _of_warnings(case: _Case) -> Iterator[str]:
    # Of layers, losses and metrics that depend on the number of workers.
    known = case.one.facts.get("warnings", ())
    yield from (told for told in case.several.facts.get("warnings", ()) if told not in known)


def _of_scale(case: _Case) -> Iterator[str]:
    """Explain what is a multiple of what it is on one worker."""
    mine, theirs = case.steps
    loss = _multiple(*(np.array([step.logs.get("loss", 0.0)]) for step in case.steps))
    gradients = _multiple(*(_joined(_gradients(step)) for step in case.steps))
    changes = _multiple(
        *(_joined(_changes(old, new)) for old, new in zip(case.before, (mine, theirs), strict=True))
    )
    found = (("loss", loss), ("gradient", gradients), ("change of the weights", changes))
    for name, ratio in found:
        if ratio is not None:
            yield (
                f"The {name} is {ratio:.3g} times that on one worker: the script multiplies or divides it by the "
                "number of workers, or adds up what should be averaged."
            )
            return


def _of_files(case: _Case) -> Iterator[str]:
    files = case.several.files
    if files:
        more = f" and {len(files) - _FILES} more" if len(files) > _FILES else ""
        yield (
            f"Several workers write {', '.join(files[:_FILES])}{more}: let rank 0 write, inside `with "
            "hvdtrain.first_rank_first()`, and the others read."
        )


def _of_noise(case: _Case) -> Iterator[str]:
    """Explain what an optimizer such as Adam makes of a gradient that is 0 but for rounding."""
    gaps = case.verdict.gaps
    noise = [gap.name for gap in gaps if gap.explained > 1]
    if 0 < len(noise) < len(gaps) / 2:  # If it is most of them, the step is random.
        yield (
            f"{noise[0]} is trained by rounding: its gradient is 0 but for that, and Adam and similar optimizers scale "
            "any gradient to one size. The difference may have grown from there. In front of BatchNormalization, "
            "use_bias=False avoids it."
        )


def _of_gradients(case: _Case) -> Iterator[str]:
    if case.verdict.outcome == "different" and _gradients(case.steps[1]):
        yield (
            "The gradients differ although the workers hold the same weights: each worker needs an equal share of the "
            "batch, the loss must be a mean over its examples, and gradients are clipped after they are averaged."
        )
        yield from _of_files(case)


def _of_places(case: _Case) -> Iterator[str]:
    if case.verdict.outcome == "unclear":
        yield (
            "On one worker, two runs with the same examples differ: the step draws random numbers (dropout, noise, or "
            "without a seed), or treats examples by their places in the batch."
        )


def _gradients(step: RecordedStep) -> Mapping[str, np.ndarray]:
    return {name: array for name, array in step.arrays.items() if name.startswith(GRADIENT_OF)}


def _changes(before: RecordedStep, after: RecordedStep) -> Mapping[str, np.ndarray]:
    """Return by how much the step has changed each floating variable that is no scalar."""
    return {
        name: array - before.arrays[name]
        for name, array in after.arrays.items()
        if array.ndim and array.dtype.kind == "f" and name in before.arrays
        if not name.startswith(GRADIENT_OF) and array.shape == before.arrays[name].shape
    }


def _joined(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    rows = [arrays[name].astype(np.float64).ravel() for name in sorted(arrays)]
    return np.concatenate([np.zeros(0), *rows])


def _multiple(one: np.ndarray, several: np.ndarray) -> float | None:
    """Return N or 1/N, for a whole number N from 2 on, if `several` is `one` times that."""
    if one.shape != several.shape or not (one @ one > 0 and np.isfinite([one, several]).all()):
        return None
    ratio = float(one @ several / (one @ one))
    whole = max(ratio, 1 / ratio) if ratio > 0 else 0.0
    is_whole = round(whole) >= 2 and abs(whole - round(whole)) <= _CLOSE * whole
    is_multiple = np.linalg.norm(several - ratio * one) <= _CLOSE * np.linalg.norm(several)
    return ratio if is_whole and is_multiple else None
