"""Notes the files that a script writes: two ranks that write the same one overwrite each other's."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.keras import is_initialized
from hvdtrain.verify.recording import write_files


@contextlib.contextmanager
def recorded_files(folder: Path) -> Iterator[None]:
    """Record in `folder` which files this rank's Python opens for writing in this block; not those of TensorFlow."""
    written: set[str] = set()
    is_over = False

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or is_over:
            return
        path, mode, flags = arguments
        writes = flags & os.O_ACCMODE or set(mode or "") & set("wax+")
        writes = writes and not flags & os.O_DIRECTORY  # A file without a name.
        if writes and isinstance(path, str) and _is_scripts(path):
            # Not resolved: under --adopt, other ranks have links, which become copies.
            written.add(str(Path(path).absolute()))

    sys.addaudithook(note)  # It stays: Python has no way to remove one.
    try:
        yield
    finally:
        is_over = True
        if is_initialized():
            write_files(folder, ALL_RANKS.rank(), written)


def _is_scripts(path: str) -> bool:
    return not path.startswith("/dev/") and "__pycache__" not in path
