"""A worker or a parameter server: serves TensorFlow's operations to the chief of its job until the chief is gone.

    TF_CONFIG=... python -m hvdtrain.start.tf_server

It exits with 0 when the chief has ended, and at once on SIGTERM. A worker restarted at the same address rejoins the
job. The environment determines which GPUs and how many threads it uses.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from hvdtrain.environment import EXIT_INTERRUPTED
from hvdtrain.errors import EngineError, HvdtrainError, UsageError
from hvdtrain.tf_config import SERVER, TF_CONFIG, WORKER, TfConfig, answers, read_tf_config

START_SECONDS = 3600.0
"""Time for the chief to start: it may read its data before it needs its workers."""
POLL_SECONDS = 2.0
ATTEMPTS = 3
"""Number of unanswered calls after which the chief counts as gone."""


def main() -> None:
    """Serve until the launch ends."""
    try:
        config = read_tf_config(os.environ)
        if config is None:
            raise UsageError(f"set {TF_CONFIG}, with a cluster and this process's task in it")
        if config.kind not in (SERVER, WORKER):
            raise UsageError(f"{TF_CONFIG}: a {config.kind} runs the training script, not a server")
        _serve(config)
    except HvdtrainError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _serve(config: TfConfig) -> None:
    if config.kind == SERVER:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # A call to a server that has gone must fail, instead of waiting for it to come back.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    import tensorflow as tf

    address = config.cluster[config.kind][config.index]
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(config.cluster),
            job_name=config.kind,
            task_index=config.index,
            protocol="grpc",
        )
    except tf.errors.OpError as error:
        raise EngineError(
            f"{config.name} cannot serve at {address}: {error.message}. Is the port taken by another process?"
        ) from error
    wait_for_end(lambda: answers(config.chief), config)
    del server
    # TensorFlow cannot stop a server, and its threads would keep this process alive.
    sys.stdout.flush()
    os._exit(0)


def wait_for_end(
    chief_answers: Callable[[], bool],
    config: TfConfig,
    sleep: Callable[[float], None] = time.sleep,
    start_seconds: float = START_SECONDS,
) -> None:
    """Wait for the chief to start, then return when it has ended.

    Args:
        chief_answers: Function that returns whether the chief responds.
        config: TF_CONFIG of this process.
        sleep: Function that waits for a number of seconds.
        start_seconds: Time limit for the chief to start.

    Raises:
        EngineError: The chief did not start in time.
    """
    for _ in range(round(start_seconds / POLL_SECONDS)):
        if chief_answers():
            break
        sleep(POLL_SECONDS)
    else:
        raise EngineError(
            f"{config.name}: the chief did not answer at {config.chief} for {start_seconds:.0f} s"
        )
    silent = 0
    while silent < ATTEMPTS:
        sleep(POLL_SECONDS)
        silent = 0 if chief_answers() else silent + 1


if __name__ == "__main__":
    main()
