"""Writes a fit's config.json, metrics.csv and events.jsonl to its run_dir."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import psutil
import tensorflow as tf

import hvdtrain
from hvdtrain.checkpoint.position import FitPosition
from hvdtrain.collectives.first_rank import on_first
from hvdtrain.data import Source
from hvdtrain.messages import logger
from hvdtrain.profiled_steps import asked_steps
from hvdtrain.runtime import Rank
from hvdtrain.strategies.strategy import Logs
from hvdtrain.trackers.tracking import Tracking
from hvdtrain.trainer.event_log import EventLog
from hvdtrain.trainer.profile import Profile
from hvdtrain.trainer.progress import Progress, Show
from hvdtrain.trainer.run_dir import RunDir, epoch_line


@dataclass(frozen=True)
class FitRecord:
    """Writes the record of one fit. Every rank has one; rank 0 writes.

    Attributes:
        run_dir: Folder of the run; None: write nothing.
        model: Model that is trained.
        rank: This rank.
        config: Settings of the Trainer, for config.json.
        tracking: Trackers of the Trainer.
    """

    run_dir: RunDir | None
    model: keras.Model
    rank: Rank
    config: dict[str, Any]
    tracking: Tracking

    @cached_property
    def events(self) -> EventLog:
        """The run's event log; a log without a file if there is no run_dir."""
        return EventLog() if self.run_dir is None else self.run_dir.events

    @cached_property
    def profile(self) -> Profile:
        """The profile of this fit, of the steps that HVDTRAIN_PROFILE asks for."""
        folder = None if self.run_dir is None else self.run_dir.path
        return Profile(asked_steps(os.environ), self.rank, folder)

    def in_run_dir(self, write: Callable[[RunDir], None]) -> None:
        """Call `write` on rank 0; if that fails, raise the error on all ranks. A collective."""
        run_dir = self.run_dir
        if run_dir is not None:
            on_first(lambda: write(run_dir), f"run_dir {str(run_dir.path)!r}")

    def write_config(self, train: Source, epochs: int) -> None:
        """Write config.json. A collective."""
        self.in_run_dir(lambda run_dir: run_dir.write_config(self._settings(train, epochs)))

    def begin_events(
        self, train: Source, epochs: int, begin: FitPosition, show: Show | None
    ) -> None:
        """Start the event log and the trackers on rank 0, if there is a run_dir, a view or a tracker.

        Args:
            train: Training data.
            epochs: Number of the last epoch, from 1.
            begin: Position at which the training begins or continues.
            show: Function that shows an event; None without a view.
        """
        if not self.rank.is_first:
            return
        if self.tracking:
            # Without checkpoints, from the number of the epoch: all are of one length, if that is known.
            steps = begin.steps or begin.epoch * (train.steps_per_epoch or 0)
            self.tracking.begin(self._settings(train, epochs), socket.gethostname(), steps)
        if self.run_dir is not None or show is not None or self.tracking:
            self.events.begin(
                show,
                self.tracking.note if self.tracking else None,
                workers=self.rank.size,
                epochs=epochs,
                steps_per_epoch=train.steps_per_epoch,
                examples=train.examples,
                epoch=begin.epoch + 1,
                step=begin.step + 1,
                host=socket.gethostname(),
            )

    def announce(self, message: str) -> None:
        """Log a message about the run_dir, on rank 0."""
        if self.run_dir is not None and self.rank.is_first:
            logger().info("run_dir %r: %s", str(self.run_dir.path), message)

    def write_epoch(self, epoch: int, logs: Logs, validates: bool, progress: Progress) -> None:
        """Write an epoch's line in metrics.csv and its event, on rank 0.

        Args:
            epoch: Index of the epoch, from 0.
            logs: Losses and metrics of the epoch.
            validates: Whether the fit validates, though perhaps not after every epoch.
            progress: Progress of the epoch, for its duration and speed.
        """
        if not self.rank.is_first:
            return
        seconds, rate = progress.seconds, progress.examples_per_second
        if self.run_dir is not None:
            line, columns = epoch_line(epoch, logs, validates, seconds, rate)
            self.run_dir.metrics.append([line], columns)
        speed = {"seconds": seconds, "examples_per_second": rate}
        facts = {"epoch": epoch + 1, "values": logs, "learning_rate": self._learning_rate()}
        self.events.note("epoch", **facts, **speed)

    def step_facts(self, epoch: int, step: int) -> dict[str, Any]:
        """Return fields of a "steps" event after step number `step` (from 1) of the epoch of index `epoch` (from 0)."""
        memory = {"host": psutil.Process().memory_info().rss}
        if tf.config.list_logical_devices("GPU"):
            memory["gpu"] = tf.config.experimental.get_memory_info("GPU:0")["current"]
        rate = self._learning_rate()
        return {"epoch": epoch + 1, "step": step, "learning_rate": rate, "memory": memory}

    def _settings(self, train: Source, epochs: int) -> dict[str, Any]:
        """Return the settings, facts about the data, versions and the optimizer."""
        facts = {"workers": self.rank.size, "epochs": epochs, "examples": train.examples}
        libraries = {"hvdtrain": hvdtrain, "keras": keras, "tensorflow": tf}
        versions = {name: library.__version__ for name, library in libraries.items()}
        optimizer = keras.saving.serialize_keras_object(self.model.optimizer)
        return self.config | facts | versions | {"optimizer": optimizer}

    def _learning_rate(self) -> float | None:
        """Return the learning rate of the model's optimizer; None for a model without `optimizer`."""
        optimizer = getattr(self.model, "optimizer", None)
        return None if optimizer is None else float(optimizer.learning_rate)
