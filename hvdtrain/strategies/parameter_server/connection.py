"""The chief's connection to its workers and servers, and the thread that watches them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import parameter_server_strategy_v2
from tensorflow.python.eager import context

from hvdtrain.environment import EXIT_FAILURE, TERMINAL
from hvdtrain.errors import EngineError
from hvdtrain.keras_internals.remote_variables import kept_variables
from hvdtrain.messages import logger
from hvdtrain.tf_config import TfConfig, answers, describe_lost, lost_server
from hvdtrain.worker.failure_report import Failure

START_SECONDS = 300.0
"""Time within which workers and servers must listen."""
POLL_SECONDS = 1.0
ATTEMPTS = 5
"""Number of unanswered calls in a row after which a server counts as lost."""
GRACE_SECONDS = 8.0
"""Time for the script to end by itself after the loss of a server."""
_COORDINATORS = ("WorkerClosureProcessingLoop", "WorkerPreemptionHandler")
"""Beginnings of the names of the coordinator's threads."""
ALONE_SECONDS = 600.0
"""Time without an answer from any worker after which the job ends."""


class _Connected(parameter_server_strategy_v2.ParameterServerStrategyV2):
    """TensorFlow's strategy, except that this process keeps the names of its devices.

    If the process were renamed to "chief", TensorFlow would no longer find tensors, variables and datasets that the
    script made before the Trainer. (Variables need `kept_variables` as well.)
    """

    _cluster_resolver: Any

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        resolver = self._cluster_resolver
        cluster = resolver.cluster_spec().as_dict()
        cluster["localhost"] = cluster.pop(coordinator_name)
        self._cluster_resolver = _resolver(cluster)
        super()._connect_to_cluster("localhost")
        self._cluster_resolver = resolver


class _RetryingCoordinator(tf.distribute.coordinator.ClusterCoordinator):
    """TensorFlow's coordinator, for Python functions that call concrete functions.

    A worker's thread calls the function, and again if the worker dies. A concrete function, the only kind that
    TensorFlow's coordinator accepts, could not tell the second call from the first.
    """

    _cluster: Any

    def schedule(self, fn: Callable[..., Any], args: Any = None, kwargs: Any = None) -> Any:
        cancellation = self._cluster.closure_queue._cancellation_mgr
        return self._cluster.schedule(cancellation.get_cancelable_function(fn), args, kwargs)


def connect(config: TfConfig) -> tf.distribute.coordinator.ClusterCoordinator:
    """Connect this process, the chief, with its workers and servers.

    Raises:
        EngineError: One of them does not answer.
    """
    wait_for_all(config)
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    tf.get_logger().addFilter(_own_words)
    threading.excepthook = without_tracebacks(threading.excepthook, config)
    with kept_variables():
        strategy = _Connected(_resolver(config.cluster))
    coordinator = _RetryingCoordinator(strategy)
    _keep_for_ever(coordinator, context.context())
    return coordinator


def _keep_for_ever(*objects: Any) -> None:
    """Keep the interpreter from destroying `objects` when it exits.

    Their destructors would contact every worker, and wait forever for a dead one. Workers and servers notice by
    themselves that the chief has ended.
    """
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def wait_for_all(
    config: TfConfig,
    answering: Callable[[str], bool] = answers,
    seconds: float = START_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until all workers and servers listen.

    Args:
        config: Configuration of the job.
        answering: Returns whether an address answers.
        seconds: Time limit.
        sleep: Sleeps for a number of seconds.

    Raises:
        EngineError: Some do not listen within the limit; names them.
    """
    missing = [*_named("server", config.servers), *_named("worker", config.workers)]
    for _ in range(max(1, round(seconds / POLL_SECONDS))):
        missing = [(name, address) for name, address in missing if not answering(address)]
        if not missing:
            return
        sleep(POLL_SECONDS)
    raise EngineError(
        f"No answer for {seconds:.0f} s from {', '.join(f'{n} at {a}' for n, a in missing)}: check that it has "
        "started, and that this host can reach it"
    )


def _named(kind: str, addresses: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(f"{kind} {index}", address) for index, address in enumerate(addresses)]


def _resolver(cluster: dict[str, list[str]]) -> tf.distribute.cluster_resolver.ClusterResolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )


def _own_words(record: logging.LogRecord) -> bool:
    """Print a worker's failure in one line, in place of TensorFlow's pages; let all other log records pass."""
    if record.filename != "cluster_coordinator.py" or record.levelno < logging.ERROR:
        return True
    lost = re.match(r"Worker /job:worker/replica:0/task:(\d+) failed", record.getMessage())
    if lost:
        logger().warning(
            "Worker %s is lost: another worker takes over its step. The worker may return", lost[1]
        )
    return False


def without_tracebacks(
    show: Callable[[threading.ExceptHookArgs], object], config: TfConfig
) -> Callable[[threading.ExceptHookArgs], object]:
    """Return a threading.excepthook that prints no traceback for the threads of TensorFlow's coordinator.

    Their errors are lost workers and servers. A lost server also ends the training with an error, which names it: such
    an error is left out, any other printed in one line. `show` is the hook for all other threads.
    """

    def hook(error: threading.ExceptHookArgs) -> object:
        text = str(error.exc_value)
        if lost_server(text, config) is not None:
            return None
        if error.thread is None or not error.thread.name.startswith(_COORDINATORS):
            return show(error)
        kind, line = error.exc_type.__name__, text.partition("\n")[0]
        logger().warning("%s has ended: %s: %s", error.thread.name, kind, line)
        return None

    return hook


@contextlib.contextmanager
def server_errors(config: TfConfig) -> Iterator[None]:
    """Turn the loss of a server inside the block into an EngineError.

    Raises:
        EngineError: A server was lost; names it.
    """
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        message = lost_server(str(error), config)
        if message is None:
            raise
        raise EngineError(message) from None


class Watch:
    """Watches the servers and workers in a thread.

    A process that dies closes its connections, which TensorFlow reports at once. A host that dies does not; then
    this thread ends the process, unless the script ends by itself.

    Args:
        config: Configuration of the job.
        answering: Returns whether an address answers.
        end: Ends this process, given the problem; default: after GRACE_SECONDS.
        poll_seconds: Interval between two rounds of calls.
        alone_seconds: Time without an answer from any worker after which the job ends.

    Attributes:
        problem: Why the job cannot continue; None while it can.
    """

    def __init__(
        self,
        config: TfConfig,
        answering: Callable[[str], bool] = answers,
        end: Callable[[str], None] | None = None,
        poll_seconds: float = POLL_SECONDS,
        alone_seconds: float = ALONE_SECONDS,
    ) -> None:
        self.problem: str | None = None
        self._config = config
        self._answering = answering
        self._end = end or _end_after_grace
        self._poll_seconds = poll_seconds
        self._alone_seconds = alone_seconds
        threading.Thread(target=self._run, daemon=True, name="hvdtrain-servers").start()

    def check(self) -> None:
        """Raise EngineError if the job cannot continue."""
        if self.problem is not None:
            raise EngineError(self.problem)

    def _run(self) -> None:
        silent = [0] * len(self._config.servers)
        last_worker = time.monotonic()
        while self.problem is None:
            time.sleep(self._poll_seconds)
            for server, address in enumerate(self._config.servers):
                silent[server] = 0 if self._answering(address) else silent[server] + 1
                if silent[server] >= ATTEMPTS:
                    self.problem = describe_lost(server, self._config)
            if any(self._answering(address) for address in self._config.workers):
                last_worker = time.monotonic()
            elif time.monotonic() - last_worker > self._alone_seconds:
                self.problem = (
                    f"No worker has answered for {self._alone_seconds:.0f} s: the run cannot "
                    "continue"
                )
        self._end(self.problem)


def _end_after_grace(problem: str) -> None:
    """End this process unless it ends by itself: it may block forever in a call to the lost host."""
    time.sleep(GRACE_SECONDS)
    # Otherwise the script has ended, or is ending, with this message as its error.
    if threading.main_thread().is_alive() and not hasattr(sys, "last_value"):
        failure = Failure(0, EXIT_FAILURE, False, problem)
        line = failure.to_line() if TERMINAL in os.environ else f"Error: {problem}"
        os.write(2, f"\n{line}\n".encode(errors="backslashreplace"))
    os._exit(EXIT_FAILURE)
