"""The folder of a run: config.json, metrics.csv (a line an epoch) and the final model. Rank 0 writes it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError

CONFIG = "config.json"
METRICS = "metrics.csv"
MODEL = "model.keras"


class RunDir:
    """Files of one run. config.json and the model are complete or absent: each is written beside its place and
    renamed. metrics.csv grows by a line an epoch."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._columns: list[str] = []

    def begin(self, first_epoch: int, continued: bool = False) -> None:
        """Make the folder.

        Nothing is overwritten. A run that continues where that one stopped, with `first_epoch` (from 0) after its
        first, adds to its metrics, and so does one that is `continued` from its checkpoints.

        Raises:
            UsageError: it cannot be made, or another run left its metrics there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"run_dir {str(self.path)!r} cannot be created: {error}") from error
        known = first_epoch > 0 or continued or bool(self._columns)
        if not known and (self.path / METRICS).exists():
            raise UsageError(
                f"run_dir {str(self.path)!r} contains another run ({METRICS}): choose a new "
                "folder, or move that one away. Only a run that continues it (checkpoints, initial_epoch "
                "or BackupAndRestore) may add to it"
            )

    def write_config(self, config: dict[str, Any]) -> None:
        """Write what the run was asked to do."""
        temporary = self.path / f".{CONFIG}.tmp"
        temporary.write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
        temporary.replace(self.path / CONFIG)

    def append_metrics(self, row: dict[str, Any], columns: list[str]) -> None:
        """Add the line of one epoch. The first call fixes the columns, and keeps the lines of earlier epochs."""
        if not self._columns:
            self._begin_metrics(row["epoch"], columns)
        with (self.path / METRICS).open("a", newline="") as file:
            plain = {
                name: getattr(value, "tolist", lambda v=value: v)() for name, value in row.items()
            }
            csv.DictWriter(file, self._columns, extrasaction="ignore").writerow(plain)

    def _begin_metrics(self, epoch: int, columns: list[str]) -> None:
        """Write the header, and the lines before `epoch` of the run that this one continues."""
        path = self.path / METRICS
        before: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                columns = [*dict.fromkeys([*(reader.fieldnames or ()), *columns])]
                before = [
                    row for row in reader if row["epoch"].isdecimal() and int(row["epoch"]) < epoch
                ]
        temporary = self.path / f".{METRICS}.tmp"
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(before)
        temporary.replace(path)
        self._columns = columns

    @property
    def model(self) -> Path:
        """The file of the final model with its optimizer."""
        return self.path / MODEL


def epoch_line(
    epoch: int, logs: dict[str, Any], validated: bool, seconds: float, rate: float
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of an epoch (counted from 0), and the columns of a run.

    Args:
        logs: the epoch's.
        validated: the run evaluates, though perhaps not after every epoch.
        seconds, rate: of training, in examples per second.
    """
    names = [name for name in logs if not name.startswith("val_")]
    if validated:
        names += [f"val_{name}" for name in names]
    speed = {"seconds": round(seconds, 3), "examples_per_second": round(rate, 1)}
    return {"epoch": epoch + 1, **logs, **speed}, ["epoch", *names, *speed]
