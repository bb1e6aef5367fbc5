"""Names likely reasons why a run on several workers differs from one, as far as the recordings show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain.verify.comparison import StepVerdict
from hvdtrain.verify.recording import Recording

_RATE = "learning_rate"


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
    # Each explains the rest.
    return (
        [*_of_data(one, reordered, several, verdict)]
        or [*_of_rates(one, several, verdict)]
        or [*_of_start(verdict)]
        or [*_of_settings(one, several)]
    )


def _of_start(verdict: StepVerdict) -> Iterator[str]:
    if verdict.step:
        return
    if verdict.outcome == "unclear":
        yield (
            "Two runs on one worker start with different weights: the script initializes them without a seed. Pass the "
            "Trainer a function that builds the model, or call hvdtrain.init(seed=0) before building it."
        )
    else:
        yield (
            "The weights differ before the first step: the script builds a different model on several workers, or "
            "draws different random numbers before building it."
        )


def _of_data(
    one: Recording, reordered: Recording, several: Recording, verdict: StepVerdict
) -> Iterator[str]:
    if not verdict.examples:
        return
    mine, again, theirs = (
        run.steps[verdict.step].examples if verdict.step < len(run.steps) else ()
        for run in (one, reordered, several)
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


def _of_rates(one: Recording, several: Recording, verdict: StepVerdict) -> Iterator[str]:
    before, after = (
        {
            n: float(a)
            for n, a in run.steps[verdict.step].arrays.items()
            if _RATE in n and not a.ndim
        }
        for run in (one, several)
    )
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            yield (
                f"The learning rate is {before[name]:g} on one worker and {after[name]:g} on several: "
                "it is scaled by learning_rate_scaling or by the script."
            )


def _of_settings(one: Recording, several: Recording) -> Iterator[str]:
    facts = several.facts
    if facts.get("sync") is not None:
        yield f"sync={facts['sync']}: workers train independently between rounds, so they do not match one worker."
    # The Trainer itself warns of layers, losses and metrics that depend on the number of workers.
    known: Sequence[str] = one.facts.get("warnings", ())
    yield from (told for told in facts.get("warnings", ()) if told not in known)
