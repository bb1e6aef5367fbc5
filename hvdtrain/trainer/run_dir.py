"""The folder of a run, with config.json, metrics.csv, events.jsonl and the final model; written by rank 0."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from hvdtrain.checkpoint.lock import LOCK, lock_folder, lock_kept
from hvdtrain.environment import CONFIG, EVENTS
from hvdtrain.errors import UsageError, warn_user
from hvdtrain.replaced_files import replacing
from hvdtrain.trainer.event_log import EventLog

METRICS = "metrics.csv"
MODEL = "model.keras"


class RunDir:
    """The files of one run.

    config.json and the model are complete or absent, because each is renamed into place. metrics.csv gets a line per
    epoch; for events.jsonl see `event_log`.

    Attributes:
        path: Path of the folder.
        keep: Function called before each write during training; raises OSError if the folder now belongs to another
            run.
        metrics: Table of the epochs' losses and metrics, metrics.csv.
        events: Log of the run's events, events.jsonl.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.keep: Callable[[], None] = self._keep_lock
        self._lock: int | None = None
        self.metrics = EpochTable(self.path / METRICS, lambda: self.keep())
        self.events = EventLog(self.path / EVENTS, lambda: self.keep())

    def begin(self, first_epoch: int, continued: bool = False) -> None:
        """Create the folder; nothing in it is overwritten.

        Args:
            first_epoch: Index of the first epoch to train, from 0; above 0 the run continues an earlier one.
            continued: Whether the run continues from checkpoints.

        Raises:
            UsageError: If the folder cannot be created, or holds the metrics of a run that this one does not continue.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{self._name} cannot be created: {error}. Choose another folder, or check its permissions"
            ) from error
        if first_epoch == 0 and not continued and self.metrics.is_begun:
            self.metrics.join()
        known = first_epoch > 0 or continued or self.metrics.is_begun
        if not known and (self.path / METRICS).exists():
            raise UsageError(
                f"{self._name} contains another run ({METRICS}): choose a new "
                "folder, or move that one away. Only a run that continues it (checkpoints, initial_epoch "
                "or BackupAndRestore) may add to it"
            )

    def lock(self) -> None:
        """Let no other run write to the folder until `release`; on a file system without locks, do nothing.

        Raises:
            UsageError: If another run holds it; names its process.
        """
        with contextlib.suppress(OSError):
            self._lock = lock_folder(self.path, self._name)

    def release(self) -> None:
        """End what `lock` began, if it did."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # The folder may belong to another run by now.
                self._keep_lock()
                (self.path / LOCK).unlink()
            os.close(self._lock)
            self._lock = None

    def _keep_lock(self) -> None:
        self._lock = lock_kept(self.path, self._name, self._lock)

    @property
    def _name(self) -> str:
        return f"run_dir {str(self.path)!r}"

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the run's settings and the versions of its libraries to config.json."""
        with replacing(self.path / CONFIG) as file:
            file.write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")

    @property
    def model(self) -> Path:
        """Path of the final model with its optimizer."""
        return self.path / MODEL


class EpochTable:
    """A CSV file with lines for each epoch, in order; the lines of an epoch that is trained again are replaced.

    Args:
        path: Path of the file.
        keep: Function called before each write; see RunDir.
    """

    def __init__(self, path: Path, keep: Callable[[], None]) -> None:
        self._path = path
        self._keep = keep
        self._columns: list[str] = []
        self._waiting: list[dict[str, Any]] = []
        self._warned = False
        self._last = self._before = 0

    @property
    def is_begun(self) -> bool:
        """Whether this object has begun the file."""
        return bool(self._columns)

    def join(self) -> None:
        """Let another fit, which counts its epochs from 1, continue the numbers of the last one."""
        self._before = self._last

    def append(self, rows: Sequence[dict[str, Any]], columns: list[str]) -> None:
        """Add the lines of one epoch.

        The first call keeps the lines of earlier epochs, and a new column is added after the others. If the file has
        been removed, a new one begins. If it cannot be written, for instance on a full disk, the user is warned once,
        and the lines are written with those of a later epoch.

        Args:
            rows: Values by column name, one dict per line; each has "epoch", from 1.
            columns: Names of the columns.
        """
        for row in rows:
            if "epoch" in row:
                row = {**row, "epoch": row["epoch"] + self._before}
                self._last = max(self._last, row["epoch"])
            self._waiting.append(row)
        try:
            self._keep()
            known = [*dict.fromkeys([*self._columns, *columns])]
            if not (self._columns and self._path.exists()):
                self._begin(known, before=self._waiting[0]["epoch"])
            elif known != self._columns:
                self._begin(known)
            self._write()
        except (OSError, csv.Error) as error:
            if not self._warned:
                warn_user(
                    f"{self._path} cannot be written: {error}. Training continues; the lines are kept in "
                    "memory and written as soon as possible"
                )
            self._warned = True

    def _write(self) -> None:
        with _open(self._path, "r+") as file:
            end = file.seek(0, os.SEEK_END)
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            try:
                writer.writerows(
                    {name: _plain(value) for name, value in row.items()} for row in self._waiting
                )
                file.flush()
            except OSError:
                os.truncate(self._path, end)
                raise
        self._waiting.clear()

    def _begin(self, columns: list[str], before: int | None = None) -> None:
        """Write the header and the lines so far; of a file that an earlier process began, those of epochs `before`."""
        kept: list[dict[str, str]] = []
        if self._path.exists():
            with _open(self._path, "r") as file:
                reader = csv.DictReader(file)
                columns = [*dict.fromkeys([*(reader.fieldnames or ()), *columns])]
                numbers = ((row.get("epoch", "0") or "", row) for row in reader)
                kept = [row for n, row in numbers if before is None or _is_before(n, before)]
        with replacing(self._path) as temporary, _open(temporary, "w") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
        self._columns = columns


def _is_before(epoch: str, limit: int) -> bool:
    return epoch.isdecimal() and int(epoch) < limit


def _open(path: Path, mode: str) -> IO[str]:
    """Open a CSV file. Bytes that are no text are kept: a file that was damaged must not end a training."""
    return path.open(mode, newline="", encoding="utf-8", errors="surrogateescape")


def _plain(value: Any) -> Any:
    """Convert a NumPy number or array to Python's types."""
    return value.tolist() if hasattr(value, "tolist") else value


def epoch_line(
    epoch: int, logs: dict[str, Any], validated: bool, seconds: float, rate: float
) -> tuple[dict[str, Any], list[str]]:
    """Return the line of an epoch in metrics.csv, and the columns of the table; see `FitRecord.write_epoch`."""
    names = [name for name in logs if not name.startswith("val_")]
    if validated:
        names += [f"val_{name}" for name in names]
    speed = {"seconds": round(seconds, 3), "examples_per_second": round(rate, 1)}
    return {"epoch": epoch + 1, **logs, **speed}, ["epoch", *names, *speed]
