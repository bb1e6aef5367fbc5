"""Shares the steps of a script's own training loop among the ranks: the tf.functions that compute gradients.

What such a function does with a batch is found out by trials. The second call, when everything is built, the fourth,
the eighth and so on are computed twice: on the whole batch, and on the ranks' shares (step_trial.py). As long as the
shares explain the whole, the calls in between are shared; otherwise every rank computes whole batches.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from hvdtrain.adopt.fits import AdoptedFits
from hvdtrain.adopt.notes import BY_HAND, WHOLE, Notes
from hvdtrain.adopt.step_arguments import StepArguments
from hvdtrain.adopt.step_trace import Tracing, is_variable
from hvdtrain.adopt.step_trial import StepTrial
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.corrections import replaced
from hvdtrain.strategies.data_dependence import first_decision

_UNCLEAR_CALLS = 8
"""Number of calls, a power of two, after which it is told that no trial has been conclusive."""
_MOST_KINDS = 100
"""Kinds of arguments of one function that are told apart; one with more has a number that changes with each call."""


class SharedSteps:
    """The functions of a script that were called so far.

    Args:
        notes: Where to tell what is done.
        fits: What runs model.fit, which shares by itself.
        folder: Folder of the script. Functions that are defined elsewhere are a library's.
    """

    def __init__(self, notes: Notes, fits: AdoptedFits, folder: Path) -> None:
        self._notes = notes
        self._fits = fits
        self._folder = f"{folder}/"
        self._rank = notes.rank
        self._steps: weakref.WeakKeyDictionary[Any, dict[Any, StepTrial]] = (
            weakref.WeakKeyDictionary()
        )
        self._training: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calling: Any = None
        self._tracing: Tracing | None = None

    def call(
        self, original: Callable[..., Any], function: Function, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a tf.function; if it is a training step that can be shared, share the work."""
        if not self._may_be_a_step(function):
            return original(function, *args, **kwargs)
        self._calling = function
        try:
            if function not in self._training:
                return original(function, *args, **kwargs)
            arguments = StepArguments.of(args, kwargs)
            step = self._step(function, arguments)
            if step is None:
                return original(function, *args, **kwargs)
            return self._next(step, function, arguments, original)
        finally:
            self._calling = None

    def gradient(
        self,
        original: Callable[..., Any],
        tape: Any,
        target: Any,
        sources: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the gradient of a tape; in a step that is being shared, reduced over the ranks."""
        found = original(tape, target, sources, *args, **kwargs)
        if self._fits.running or not any(map(is_variable, tf.nest.flatten(sources))):
            return found
        if self._tracing is not None:
            return self._tracing.of(found, sources)
        if self._calling is not None:
            self._training.add(self._calling)
        else:
            self._notes.tell("the training loop", f"{WHOLE}. {BY_HAND}")
        return found

    def apply(
        self, original: Callable[..., Any], optimizer: Any, grads: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Apply gradients.

        Raises:
            UsageError: While tracing a share: they depend on a decision that each rank would make for itself.
        """
        grads = list(grads)
        if self._tracing is not None and self._tracing.reducer is not None:
            where = first_decision([gradient for gradient in grads if gradient is not None])
            if where:
                raise UsageError(f"a value of the batch decides what it does ({where})")
        return original(optimizer, grads, *args, **kwargs)

    def _may_be_a_step(self, function: Function) -> bool:
        if self._fits.way.parted or not tf.executing_eagerly():
            return False
        if self._fits.running or self._calling is not None:
            return False
        if tf.config.functions_run_eagerly():
            return False
        if threading.current_thread() is not threading.main_thread():
            return False
        _, step = tf.__internal__.decorator.unwrap(function.python_function)
        code = getattr(step, "__code__", None)
        file = "" if code is None else code.co_filename
        return file.startswith(self._folder) and "site-packages" not in file

    def _step(self, function: Function, arguments: StepArguments) -> StepTrial | None:
        """Return what is known of a step with such arguments; None if it is not to be shared."""
        kinds = self._steps.setdefault(function, {})
        kind = arguments.signature
        if kind not in kinds:
            if arguments.examples == 0 or len(kinds) == _MOST_KINDS:
                self._tell_whole("no argument of it is a batch")
                return None
            if arguments.examples % self._rank.size:
                # Often the last batch of an epoch, too small to tell of.
                return None
            kinds[kind] = StepTrial()
        step = kinds[kind]
        return None if step.reason else step

    def _next(
        self,
        step: StepTrial,
        function: Function,
        arguments: StepArguments,
        original: Callable[..., Any],
    ) -> Any:
        step.calls += 1
        args, kwargs = arguments.structure
        tries = step.calls & (step.calls - 1) == 0
        if not (tries or step.shared) or not self._fits.way.joins("the training step"):
            return original(function, *args, **kwargs)
        if tries:
            was_shared = step.shared is not None
            try:
                step.trace(function, self._during, arguments, self._rank)
            except Exception as error:  # Whatever a stranger's code raises when it is traced again.
                step.refuse(error)
            reasons = ALL_RANKS.exchange(step.reason, "adopted_step")
            plain = functools.partial(original, function, *args, **kwargs)
            if any(reasons):
                step.reason = next(filter(None, reasons))
                self._tell_whole(step.reason)
                return plain()
            result = step.run(arguments, self._rank, plain)
            if step.reason:
                self._tell_whole(step.reason, was_shared)
            elif step.shared is not None:
                how = f"{self._rank.size} workers share each batch of {arguments.examples}"
                self._notes.tell("the training step", how)
            elif step.calls == _UNCLEAR_CALLS:
                self._tell_whole(
                    "what it keeps or returns has not changed yet, so its rule is not known"
                )
            return result
        assert step.shared is not None
        share, named = arguments.share(self._rank)
        return step.shared(*share, **named)

    def _tell_whole(self, reason: str, was_shared: bool = False) -> None:
        now = "from now on " if was_shared else ""
        self._notes.tell("the training step", f"{now}{WHOLE}. The reason: {reason}. {BY_HAND}")

    @contextlib.contextmanager
    def _during(self, tracing: Tracing) -> Iterator[None]:
        self._tracing = tracing
        try:
            yield
        finally:
            self._tracing = None


@contextlib.contextmanager
def shared_steps(notes: Notes, fits: AdoptedFits, folder: Path) -> Iterator[None]:
    """Share the steps of a script's own training loops in this block."""
    if notes.rank.size == 1:
        yield
        return
    steps = SharedSteps(notes, fits, folder)
    with (
        replaced(Function, "__call__", steps.call),
        replaced(tf.GradientTape, "gradient", steps.gradient),
        replaced(BaseOptimizer, "apply", steps.apply),
    ):
        yield
