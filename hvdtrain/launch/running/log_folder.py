"""The folder where the files of a run are kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hvdtrain.errors import UsageError


def make_log_dir(wanted: Path | None) -> Path:
    """Make the folder for a run's files: `wanted`, or a new one. Raises UsageError."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = wanted or Path(".hvdtrain/logs") / stamp
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in range(2, 1000):
            try:
                path.mkdir(exist_ok=wanted is not None)
                if not os.access(path, os.W_OK | os.X_OK):
                    raise UsageError(
                        f"the log folder {path} is not writable: choose another with --log-dir"
                    )
                return path
            except FileExistsError:
                if wanted is not None:
                    raise
                path = path.with_name(f"{stamp}-{number}")
    except OSError as error:
        raise UsageError(
            f"cannot make the log folder {path}: {error.strerror}; choose another with --log-dir"
        ) from error
    raise UsageError(f"too many log folders in {path.parent}: choose another with --log-dir")
