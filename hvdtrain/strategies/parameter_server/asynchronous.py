"""ParameterServer: the Trainer's strategy for asynchronous training."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvdtrain.collectives.metrics import check_additive
from hvdtrain.data import Share
from hvdtrain.errors import UsageError, require_integer
from hvdtrain.keras_internals.building import build_model, symbolic_call
from hvdtrain.keras_internals.optimizers import is_distributed
from hvdtrain.keras_internals.remote_variables import look_up_rows
from hvdtrain.runtime import Rank
from hvdtrain.strategies.gather import gather_predictions
from hvdtrain.strategies.parameter_server.async_steps import AsyncSteps, Pending
from hvdtrain.strategies.parameter_server.connection import Watch, connect, server_errors
from hvdtrain.strategies.parameter_server.variable_placement import MIN_PART_BYTES, move_to_servers
from hvdtrain.strategies.strategy import Strategy
from hvdtrain.strategy_names import PARAMETER_SERVER
from hvdtrain.tf_config import CHIEF, TfConfig, read_tf_config


class ParameterServer(Strategy):
    """Asynchronous training: workers compute steps at their own speed, servers hold the variables.

    This process, the chief, reads the data and gives each global batch to one worker. Updates do not wait for each
    other: a worker computes with weights that others change meanwhile, so weights differ from run to run. With
    one worker and `in_flight` 1 they are those of one process.

    A step whose worker dies is computed by another one, and its update of the weights is made once. The only exception
    is a worker that dies at the very moment when it tells the servers that all gradients have arrived: then this one
    update may be missing, or be made twice, on some of the servers.

    State that a step reads, changes and writes back (momenta, BatchNormalization's statistics) is changed by
    additions, of which none is lost; each is computed from the value that the worker read.

    Args:
        in_flight: Number of batches in flight per worker, including the one that it computes. It bounds the memory of
            the chief and the staleness of gradients.
        min_part_bytes: Smallest part, in bytes, into which a weight is split over servers. Weights whose optimizer
            needs whole weights (Lamb, Muon, Adafactor) are not split.

    Raises:
        UsageError: An argument is not a positive integer.
    """

    name: ClassVar[str] = PARAMETER_SERVER

    def __init__(self, in_flight: int = 2, min_part_bytes: int = MIN_PART_BYTES) -> None:
        super().__init__()
        require_integer("in_flight", in_flight)
        require_integer("min_part_bytes", min_part_bytes)
        self._in_flight = in_flight
        self._min_part_bytes = min_part_bytes
        self._config: TfConfig | None = None
        self._coordinator: Any = None
        self._watch: Watch | None = None

    def start(self, seed: int) -> Rank:
        config = read_tf_config(os.environ)
        if config is None:
            raise UsageError(
                "strategy='parameter-server' needs workers and servers: start the script with "
                "hvdtrain run --strategy parameter-server --workers N --ps M, or with TF_CONFIG set in each process"
            )
        if config.kind != CHIEF:
            _become_server()
        rank = super().start(seed)
        self._config = config
        self.workers = len(config.workers)
        self._coordinator, self._watch = _join(config)
        return rank

    def distribute(self, optimizer: Any) -> Any:
        if is_distributed(optimizer):
            raise UsageError(
                "strategy='parameter-server' needs a plain Keras optimizer, not a "
                "DistributedOptimizer"
            )
        if getattr(optimizer, "gradient_accumulation_steps", None):
            raise UsageError(
                "strategy='parameter-server' does not work with gradient_accumulation_steps: workers would mix their "
                "sums. Use a larger global_batch_size"
            )
        return optimizer

    def reset_metrics(self, model: keras.Model) -> None:
        super().reset_metrics(model)
        check_additive(model.metrics)

    def prepare(self, model: keras.Model, data: Any, what: str) -> AsyncSteps:
        _check(model)
        build_model(model, data)
        return self._steps(model)

    def prepare_prediction(self, model: keras.Model, inputs: Any) -> AsyncSteps:
        _check(model)
        symbolic_call(model, inputs)
        return self._steps(model)

    def _steps(self, model: keras.Model) -> AsyncSteps:
        assert self._config is not None and self._watch is not None
        self.build_optimizer(model)
        with server_errors(self._config):
            move_to_servers(model, model.optimizer, len(self._config.servers), self._min_part_bytes)
            look_up_rows(model)
            limit = self._in_flight * self.workers
            return AsyncSteps(model, self._coordinator, self._watch, self._config, limit)

    def gather(self, outputs: Iterable[tuple[Share, Pending]]) -> Any:
        assert self._config is not None
        with server_errors(self._config):
            # Start all predictions before waiting for the first; their input may be larger than the memory.
            started = [(replace(share, data=()), pending) for share, pending in outputs]
            return gather_predictions((share, pending.get()) for share, pending in started)

    def save(self, model: keras.Model, path: Path) -> None:
        assert self._config is not None
        with server_errors(self._config):
            super().save(model, path)

    def load(self, model: keras.Model, path: Path) -> None:
        assert self._config is not None
        with server_errors(self._config):
            super().load(model, path)


def _check(model: keras.Model) -> None:
    """Raise UsageError for settings that do not work with workers that use variables on servers."""
    if model.jit_compile:
        raise UsageError(
            "strategy='parameter-server' does not work with jit_compile=True: XLA cannot use other hosts' variables"
        )
    if model.run_eagerly:
        raise UsageError(
            "strategy='parameter-server' does not work with run_eagerly=True: workers run compiled steps. Debug "
            "with strategy='horovod' on one worker"
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise UsageError(
            "strategy='parameter-server' does not work with a dynamic loss scale (precision='mixed_float16'): another "
            "worker could change it within a step. Use precision='mixed_bfloat16', or a fixed loss_scale_factor"
        )


@functools.cache
def _join(config: TfConfig) -> tuple[Any, Watch]:
    """Connect this process with the others, once for all Trainers."""
    # The chief computes nothing: GPUs are for the workers, which may be on the same host.
    with contextlib.suppress(RuntimeError):  # The script has used TensorFlow already.
        tf.config.set_visible_devices([], "GPU")
    return connect(config), Watch(config)


def _become_server() -> None:
    """Turn this process, whose TF_CONFIG names a worker or server, into one; does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "hvdtrain.start.tf_server"])
