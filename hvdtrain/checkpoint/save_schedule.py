"""Checkpoints: when a Trainer saves, and how many checkpoints it keeps."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError, require_integer


@dataclass(frozen=True)
class Checkpoints:
    """When a Trainer saves: after each epoch and, on request, within epochs.

    Args:
        every_steps: Number of training steps between checkpoints within an epoch, counted on every rank alike.
        keep: Number of checkpoints to keep, at least 2, so that there is an older one if the newest is damaged.
        every_minutes: Number of minutes between checkpoints within an epoch, checked between steps about once a second.
        max_failures: Number of failed checkpoints in a row that ends the training with an error. None: continue, with a
            warning each time.
        preemption_file: Path of a file; when it appears on the host of any rank, the training saves and exits as on
            SIGTERM. Checked about once a second. For clouds that announce preemption by other means than a signal.
        mirror: URL or path of a folder, in any storage that fsspec supports (s3://, gs://, file://), to which each
            checkpoint is copied. A run resumes from there if it has a newer checkpoint than run_dir. Other files in
            run_dir are not copied.

    Raises:
        UsageError: If a value is out of range.
    """

    every_steps: int | None = None
    keep: int = 2
    every_minutes: float | None = None
    max_failures: int | None = None
    preemption_file: str | Path | None = None
    mirror: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        require_integer("Checkpoints: keep", self.keep, 2)
        for name in ("every_steps", "max_failures"):
            if getattr(self, name) is not None:
                require_integer(f"Checkpoints: {name}", getattr(self, name))
        minutes = self.every_minutes
        if minutes is not None and not (isinstance(minutes, Real) and minutes > 0):
            raise UsageError(f"Checkpoints: every_minutes={minutes!r}: pass a positive number")
        for name in ("preemption_file", "mirror"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike | None):
                raise UsageError(f"Checkpoints: {name}={value!r}: pass a path")
        # A Path makes one slash of two: it would be a folder on this machine.
        if self.mirror is not None and re.match(r"\w[\w+.-]*:/(?!/)", os.fspath(self.mirror)):
            raise UsageError(f"Checkpoints: mirror={self.mirror!r}: pass a URL as a str")

    def facts(self) -> dict[str, Any]:
        """Return the values, other than defaults, that must be the same on every rank."""
        paths = ("preemption_file", "mirror")
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in paths}
        return {name: value for name, value in chosen.items() if value != getattr(type(self), name)}
