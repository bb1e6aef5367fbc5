"""Steps that workers compute at their own speed, coordinated by the chief.

Each global batch is one closure of TensorFlow's ClusterCoordinator: one worker computes it with the weights that the
servers hold at that time, and updates them. If the worker dies, another one gets the closure, and the update is
repeated only if it was not made yet: a batch counts exactly once in the weights, in the metrics and in the number
of steps, and an epoch has as many updates as on one worker.

One gap remains: a worker may die at the very moment when it has told some servers, but not yet all, that all gradients
have arrived. Then this one update may be missing, or be made twice, on some of the servers.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.metrics import as_value
from hvdtrain.data import Share
from hvdtrain.strategies.parameter_server.connection import Watch, server_errors
from hvdtrain.strategies.parameter_server.functions import StepFunctions, Ticket, Traced
from hvdtrain.strategies.strategy import Logs, Steps
from hvdtrain.tf_config import TfConfig, lost_server

REFRESH_SECONDS = 0.2
"""Interval at which the running logs are updated."""


class _LostError(Exception):
    """A worker died after the update of its step, before its result was read."""


@dataclass(eq=False)
class Pending:
    """A step in flight, and its result when it is done.

    Attributes:
        kind: "train", "test" or "predict".
        traced: Traced function of the step.
        ticket: Identifies the step.
        data: Data of the share; None when the step is done.
        arguments: Arguments of the function; None when the step is done.
        wait: Waits until some step is done.
        result: Outputs of a prediction, as NumPy arrays.
        was_begun: Whether a worker has begun the step.
        is_done: Whether the result has arrived.
    """

    kind: str
    traced: Traced
    ticket: Ticket
    data: Any
    arguments: Any
    wait: Callable[[], None]
    result: Any = None
    was_begun: bool = False
    is_done: bool = False

    def get(self) -> Any:
        """Wait until the step is done; return its result."""
        while not self.is_done:
            self.wait()
        return self.result


class AsyncSteps(Steps):
    """The steps of one model.

    Args:
        model: Built and compiled model, whose variables are on the servers.
        coordinator: Coordinator that schedules steps on workers.
        watch: Watch over servers and workers.
        config: Configuration of the job.
        limit: Largest number of steps in flight.
    """

    def __init__(
        self, model: keras.Model, coordinator: Any, watch: Watch, config: TfConfig, limit: int
    ) -> None:
        self._model = model
        self._coordinator = coordinator
        self._watch = watch
        self._config = config
        self._limit = limit
        self._functions = StepFunctions(model, limit)
        self._free_slots = list(range(limit))
        self._numbers = itertools.count(1)
        self._fetchers = ThreadPoolExecutor(limit, thread_name_prefix="hvdtrain-fetch")
        self._running: dict[Future[Any], Pending] = {}
        self._total: list[np.ndarray] | None = None
        self._logs: Logs = {}
        self._refreshed = 0.0

    def train(self, shares: Sequence[Share]) -> Logs:
        """Schedule training on `shares`; return the running logs of the steps done so far.

        The returned dict is updated until `finish`.
        """
        iterations = self._functions.constants[0]
        for share in shares:
            self._count("train", share)
            # The scheduled step carries its own number; this is the number of the next one.
            iterations.value.assign_add(1)
        return self._logs

    def test(self, share: Share) -> Logs:
        """Schedule the evaluation of `share`; return the running logs of the steps done so far."""
        self._count("test", share)
        return self._logs

    def predict(self, share: Share) -> Pending:
        """Schedule a prediction; return the step, whose result will be the model's outputs for `share`."""
        return self._start("predict", share.data)

    def finish(self) -> None:
        """Wait for all steps, after which the metrics are complete."""
        while self._running:
            self._wait()
        self._refresh()
        self._total = None
        self._watch.check()

    def _count(self, kind: str, share: Share) -> None:
        if self._total is None:
            self._total = [v.value.numpy().astype(np.float64) for v in self._functions.metrics]
            self._logs = {}
        self._start(kind, share.data)

    def _start(self, kind: str, data: Any) -> Pending:
        while len(self._running) >= self._limit:
            self._wait()
        traced = self._functions.traced(kind, data)
        ticket = Ticket(self._free_slots.pop(), next(self._numbers))
        arguments = self._functions.arguments(ticket, data)
        pending = Pending(kind, traced, ticket, data, arguments, self._wait)
        self._schedule(pending)
        return pending

    def _schedule(self, pending: Pending) -> None:
        self._watch.check()
        with server_errors(self._config):
            step = functools.partial(self._run, pending)
            remote = self._coordinator.schedule(step, args=pending.arguments)
        self._running[self._fetchers.submit(self._fetch, remote)] = pending

    def _run(self, pending: Pending, *arguments: Any) -> Any:
        """Run a step on a worker, again if a worker dies; return None for an update that was already applied."""
        was_begun, pending.was_begun = pending.was_begun, True
        if was_begun and pending.kind == "train" and self._functions.was_applied(pending.ticket):
            return None
        return pending.traced.function(*arguments)

    def _fetch(self, remote: Any) -> Any:
        """Return the result of a step as NumPy arrays."""
        # Errors of the step itself; if its worker dies, the coordinator repeats the step on another one.
        error = remote._get_error()
        if error is not None:
            raise error
        try:
            result = tf.nest.map_structure(_numpy, remote.get())
        except tf.errors.OpError as error:
            if lost_server(str(error), self._config) is not None:
                raise
            raise _LostError from error
        if result is None:
            raise _LostError
        return result

    def _wait(self) -> None:
        """Wait until at least one step is done; take the results of all that are."""
        done: set[Future[Any]] = set()
        while not done:
            self._watch.check()
            done, _ = wait(self._running, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            pending = self._running.pop(future)
            try:
                with server_errors(self._config):
                    result = future.result()
            except _LostError:
                self._again(pending)
            else:
                self._take(pending, result)
        if time.monotonic() - self._refreshed > REFRESH_SECONDS:
            self._refresh()

    def _again(self, pending: Pending) -> None:
        """Recompute a lost result. A training step was already applied, so only its metrics are computed, by a test."""
        if pending.kind == "train":
            pending.kind = "test"
            pending.traced = self._functions.traced("test", pending.data)
        self._schedule(pending)

    def _take(self, pending: Pending, result: Any) -> None:
        pending.is_done = True
        self._free_slots.append(pending.ticket.slot)
        # Release the data: there may be many predictions.
        pending.data = pending.arguments = None
        if pending.kind == "predict":
            pending.result = result
            return
        assert self._total is not None
        state, logs = self._functions.unpack(result, pending.traced)
        for number, (variable, value) in enumerate(
            zip(self._functions.metrics, state, strict=True)
        ):
            added = getattr(variable, "aggregation", "sum") in ("sum", None)
            self._total[number] = self._total[number] + value if added else value
        self._logs.update(logs)

    def _refresh(self) -> None:
        """Update the metrics, and the logs that `train` and `test` returned."""
        if self._total is None:
            return
        self._refreshed = time.monotonic()
        for variable, value in zip(self._functions.metrics, self._total, strict=True):
            variable.value.assign(value.astype(variable.value.dtype.as_numpy_dtype))
        results = self._model.get_metrics_result()
        if set(self._logs) <= set(results):
            self._logs.update({name: as_value(value) for name, value in results.items()})


def _numpy(value: Any) -> Any:
    return None if value is None else value.numpy()
