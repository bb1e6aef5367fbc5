"""The folder of a run: config.json, metrics.csv (a line an epoch) and the final model. Rank 0 writes it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

CONFIG = "config.json"
METRICS = "metrics.csv"
MODEL = "model.keras"


class RunDir:
    """Files of one run. A file is complete or absent: it is written beside its place and renamed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._columns: list[str] = []

    def complaint(self) -> str | None:
        """Return what is wrong if another run left its metrics here: nothing is overwritten."""
        if self._columns or not (self.path / METRICS).exists():
            return None
        return f"run_dir {str(self.path)!r} holds another run ({METRICS}): choose a new folder, or move that one away"

    def write_config(self, config: dict[str, Any]) -> None:
        """Write what the run was asked to do."""
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / f".{CONFIG}.tmp"
        temporary.write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
        temporary.replace(self.path / CONFIG)

    def append_metrics(self, row: dict[str, Any], columns: list[str]) -> None:
        """Add the line of one epoch; the first call fixes the columns."""
        is_first = not self._columns
        self._columns = self._columns or columns
        with (self.path / METRICS).open("a", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            if is_first:
                writer.writeheader()
            writer.writerow(row)

    @property
    def model(self) -> Path:
        """The file of the final model with its optimizer."""
        return self.path / MODEL
