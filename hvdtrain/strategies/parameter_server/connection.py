"""The chief's connection to its workers and servers, and the watch over them."""

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
from hvdtrain.tf_config import TfConfig, answers, describe_lost, lost_server
from hvdtrain.worker.failure_report import Failure

START_SECONDS = 300.0
"""Workers and servers must listen by then."""
POLL_SECONDS = 1.0
ATTEMPTS = 5
"""A server counts as gone after this many calls without an answer."""
GRACE_SECONDS = 8.0
"""For the script to end by itself, once a server is gone."""
ALONE_SECONDS = 600.0
"""The job ends when no worker has answered for so long."""


class _Connected(parameter_server_strategy_v2.ParameterServerStrategyV2):
    """TensorFlow's strategy, but this process keeps its name for its devices.

    Renamed to "chief", TensorFlow would no longer find any tensor, variable or dataset that the script made
    before it came to the Trainer. (Variables need `kept_variables` as well.)
    """

    _cluster_resolver: Any

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        resolver = self._cluster_resolver
        cluster = resolver.cluster_spec().as_dict()
        cluster["localhost"] = cluster.pop(coordinator_name)
        self._cluster_resolver = _resolver(cluster)
        super()._connect_to_cluster("localhost")
        self._cluster_resolver = resolver


class _Repeating(tf.distribute.coordinator.ClusterCoordinator):
    """TensorFlow's coordinator, for Python functions that call concrete ones.

    A worker's thread calls it, again if the worker dies. Of a concrete function, which is all that TensorFlow's own
    takes, nothing would tell a second call from the first one.
    """

    _cluster: Any

    def schedule(self, fn: Callable[..., Any], args: Any = None, kwargs: Any = None) -> Any:
        cancellation = self._cluster.closure_queue._cancellation_mgr
        return self._cluster.schedule(cancellation.get_cancelable_function(fn), args, kwargs)


def connect(config: TfConfig) -> tf.distribute.coordinator.ClusterCoordinator:
    """Connect this process, the chief, with its workers and servers.

    Raises:
        EngineError: one of them does not answer.
    """
    wait_for_all(config)
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    tf.get_logger().addFilter(_own_words)
    threading.excepthook = without_lost_servers(threading.excepthook, config)
    with kept_variables():
        strategy = _Connected(_resolver(config.cluster))
    coordinator = _Repeating(strategy)
    _keep_for_ever(coordinator, context.context())
    return coordinator


def _keep_for_ever(*objects: Any) -> None:
    """Keep the interpreter from destroying these at its end.

    They would say goodbye to every worker, and wait forever for one that has died. Workers and servers notice
    by themselves that the chief is gone.
    """
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def wait_for_all(
    config: TfConfig,
    answering: Callable[[str], bool] = answers,
    seconds: float = START_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when all workers and servers listen.

    Raises:
        EngineError: some do not within `seconds`; it names them.
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
    """Say a worker's failure in one line, where TensorFlow writes pages; pass on everything else."""
    if record.filename != "cluster_coordinator.py" or record.levelno < logging.ERROR:
        return True
    lost = re.match(r"Worker /job:worker/replica:0/task:(\d+) failed", record.getMessage())
    if lost:
        print(
            f"Worker {lost[1]} is lost: another worker takes over its step. The worker may return",
            file=sys.stderr,
            flush=True,
        )
    return False


def without_lost_servers(
    show: Callable[[threading.ExceptHookArgs], object], config: TfConfig
) -> Callable[[threading.ExceptHookArgs], object]:
    """A threading.excepthook without the losses of servers, which end a thread of TensorFlow's and also the training.

    Args:
        show: shows all other errors.
        config: of the job.
    """

    def hook(error: threading.ExceptHookArgs) -> object:
        return None if lost_server(str(error.exc_value), config) else show(error)

    return hook


@contextlib.contextmanager
def server_errors(config: TfConfig) -> Iterator[None]:
    """Turn the loss of a server inside this block into an EngineError that names it.

    Raises:
        EngineError: a server was lost; names it.
    """
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        message = lost_server(str(error), config)
        if message is None:
            raise
        raise EngineError(message) from None


class Watch:
    """Looks after the servers and workers from a thread.

    A process that dies closes its connections, and TensorFlow reports it at once. A host that dies does not.
    Then this thread ends the process, if the script does not end by itself.
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
        """Raise EngineError if the job cannot go on."""
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
    """End this process unless it ends by itself: it may wait forever in a call to the host that is gone."""
    time.sleep(GRACE_SECONDS)
    # Otherwise the script has ended, with this message as its error.
    if threading.main_thread().is_alive():
        failure = Failure(0, EXIT_FAILURE, False, problem)
        line = failure.to_line() if TERMINAL in os.environ else f"Error: {problem}"
        os.write(2, f"\n{line}\n".encode(errors="backslashreplace"))
    os._exit(EXIT_FAILURE)
