"""A training step of a script, computed on a whole batch and on the ranks' shares of it, and what follows."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from hvdtrain.adopt.step_arguments import StepArguments
from hvdtrain.adopt.step_rules import chosen, output_rules, same_gradients, state_rules
from hvdtrain.adopt.step_trace import (
    OPS,
    Tracing,
    captured,
    leaves_of,
    merged,
    read,
    traced,
    write,
)
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.errors import UsageError
from hvdtrain.runtime import Rank

_NO_SUM = "the gradients of its shares do not add up to those of the whole batch"

Context = Callable[[Tracing], contextlib.AbstractContextManager[None]]


class StepTrial:
    """What is known of one function, called with arguments of one kind.

    Attributes:
        calls: How often it was called.
        shared: Computes a step on a rank's share, and returns the result of the whole batch. None: not known how.
        reason: Why it cannot be shared; "" if it may be.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.shared: Any = None
        self.reason = ""
        self._trace: Callable[..., Any]
        self._whole: Any = None
        self._share: Any = None
        self._handles: list[Any] = []
        self._rules: list[set[str]] = []
        """Of the results, and of the variables."""
        self._weights: list[bool] = []
        """Which of them are variables of several numbers that have had the same bits on all shares so far."""
        self._reduction = "mean"

    def refuse(self, error: Exception) -> None:
        """Do not share the step any more."""
        self.reason, self.shared = _reason(error), None

    def trace(
        self, function: Function, context: Context, arguments: StepArguments, rank: Rank
    ) -> None:
        """Trace the step on the whole batch and on a share, once.

        Raises:
            UsageError: Running it twice would have other effects.
            Exception: Whatever the step raises when it is traced again.
        """
        if self._whole is not None:
            return
        self._trace = traced(function, context)
        args, kwargs = arguments.structure
        whole = self._trace()
        self._handles = captured(whole.get_concrete_function(*args, **kwargs))
        share = self._trace(self._reduction)
        args, kwargs = arguments.share(rank)
        share.get_concrete_function(*args, **kwargs)
        self._whole, self._share = whole, share

    def run(self, arguments: StepArguments, rank: Rank, original: Callable[[], Any]) -> Any:
        """Compute the step on the whole batch by `original`; return its result, and learn from the shares."""
        before = self._read()
        result = original()
        after = self._read()
        try:
            whole = leaves_of(result)
            gradients = self._gradients(arguments, before, after, whole)
            found = self._on_share(before, gradients, arguments.share(rank))
            if not self._rules and (others := arguments.varied()) is not None:
                self._try_others(before, others, rank)
            self._learn(before, after, whole, found)
        except (UsageError, tf.errors.OpError) as error:
            self.refuse(error)
        finally:
            self._put(after)
        return result

    def _gradients(
        self,
        arguments: StepArguments,
        before: Sequence[Any],
        after: Sequence[Any],
        results: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        """Return the gradients of the whole batch.

        Raises:
            UsageError: The step, traced anew, has other results: a value in Python has changed since it was traced.
        """
        self._put(before)
        args, kwargs = arguments.structure
        result, gradients = self._whole(*args, **kwargs)
        pairs = zip(results, leaves_of(result), strict=True)
        alike = all("same" in output_rules(one, [other]) for one, other in pairs)
        states = zip(before, after, self._read(), strict=True)
        if not alike or not all(
            "same" in state_rules(old.numpy(), new.numpy(), [again.numpy()])
            for old, new, again in states
        ):
            raise UsageError("it has another result when it is traced again")
        return leaves_of(gradients)

    def _on_share(
        self,
        before: Sequence[Any],
        whole: Sequence[np.ndarray],
        share: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> list[np.ndarray]:
        """Return the results of the step on this rank's share, then the variables."""
        for reduction in [self._reduction] if self._rules else ["mean", "sum"]:
            if reduction != self._reduction:
                # A loss that is a sum over the batch.
                self._reduction, self._share = reduction, self._trace(reduction)
            self._put(before)
            result, gradients = self._share(*share[0], **share[1])
            alike = same_gradients(whole, leaves_of(gradients))
            if all(ALL_RANKS.exchange(alike, "adopted_gradients")):
                return [*leaves_of(result), *(one.numpy() for one in self._read())]
        raise UsageError(_NO_SUM)

    def _try_others(self, before: Sequence[Any], others: StepArguments, rank: Rank) -> None:
        """Compare the gradients for other labels and padding, which the script's batches may have later.

        Raises:
            UsageError: Those of the shares do not add up.
        """
        # Without collectives: the step may not take them, and fail on one rank only.
        found: list[list[np.ndarray]] = []
        with contextlib.suppress(tf.errors.OpError):
            for args, kwargs in (others.structure, others.share(rank)):
                self._put(before)
                found.append(leaves_of(self._whole(*args, **kwargs)[1]))
        finite = len(found) == 2 and all(np.isfinite(one).all() for one in found[0])
        if not all(ALL_RANKS.exchange(finite, "adopted_others")):
            return
        whole, own = found
        reduce = OPS[self._reduction]
        shares = [
            ALL_RANKS.allreduce(one, f"adopted_other_{n}", reduce) for n, one in enumerate(own)
        ]
        # The same on all ranks, as both are.
        if not same_gradients(whole, leaves_of(shares)):
            raise UsageError(f"{_NO_SUM}, once labels or padding vary")

    def _learn(
        self,
        before: Sequence[Any],
        after: Sequence[Any],
        results: Sequence[np.ndarray],
        share: Sequence[np.ndarray],
    ) -> None:
        """Keep the rules that explain this trial, too; share the step if there is one for everything."""
        everyone = _of_all_ranks(share)
        count = len(results)
        rules = [output_rules(*one) for one in zip(results, everyone[:count], strict=True)]
        rules += [
            state_rules(old.numpy(), new.numpy(), shares)
            for old, new, shares in zip(before, after, everyone[count:], strict=True)
        ]
        weights = [False] * count
        weights += [
            shares[0].size > 1 and len({one.tobytes() for one in shares}) == 1
            for shares in everyone[count:]
        ]
        if self._rules:
            rules = [one & known for one, known in zip(rules, self._rules, strict=True)]
            weights = [one and known for one, known in zip(weights, self._weights, strict=True)]
        self._rules, self._weights = rules, weights
        choice = [chosen(*one) for one in zip(rules, weights, strict=True)]
        found = ALL_RANKS.exchange([all(rules), choice], "adopted_rules")
        if any(one != [True, choice] for one in found):
            raise UsageError("its results on shares do not make that on the whole batch")
        clear = [rule for rule in choice if rule is not None]
        if len(clear) < len(choice):
            self.shared = None
        elif self.shared is None:
            merge = merged(self._handles, clear[count:], clear[:count])
            self.shared = self._trace(self._reduction, merge)

    def _read(self) -> list[Any]:
        return [read(handle) for handle in self._handles]

    def _put(self, values: Sequence[Any]) -> None:
        for handle, value in zip(self._handles, values, strict=True):
            write(handle, value)


def _reason(error: BaseException) -> str:
    """Return what a UsageError says, which AutoGraph may have wrapped; of another error, its type."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, UsageError):
        found = found.__cause__ or found.__context__
    return f"it fails on a share ({type(error).__name__})" if found is None else str(found)


def _of_all_ranks(arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Return the ranks' arrays for each of `arrays`; those that are the same everywhere are not sent."""
    digests = [hashlib.blake2b(one.tobytes()).hexdigest() for one in arrays]
    everyones = ALL_RANKS.exchange(digests, "adopted_digests")
    places = [
        place for place, those in enumerate(zip(*everyones, strict=True)) if len(set(those)) > 1
    ]
    sent = ALL_RANKS.exchange([arrays[place] for place in places], "adopted_shares")
    found = [[one] * len(everyones) for one in arrays]
    for number, place in enumerate(places):
        found[place] = [those[number] for those in sent]
    return found
