"""Files that are replaced as a whole: the new one is written beside the old one, flushed to disk, then renamed.

A process that is killed meanwhile keeps the old file.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.rank_variables import rank_of


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write, which then replaces `path`; remove it if writing fails.

    A symbolic link is kept, and points to the new file. What is no plain file, such as a device, is written in place.
    Ranks that write the same file, by a mistake in the script, have a temporary one each.

    Raises:
        OSError: The file cannot be written, and the old one is still there.
    """
    try:
        path = path.resolve()
    except RuntimeError as error:  # Up to Python 3.12.
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
    if path.exists() and not path.is_file():
        yield path
        return
    temporary = beside(path, rank_of(os.environ))
    try:
        yield temporary
        flush(temporary)
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
        flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def beside(path: Path, rank: int = 0) -> Path:
    """Return a rank's temporary path for `path`, with the same suffix, from which Keras derives the format."""
    return path.with_name(f".tmp.{f'{rank}.' if rank else ''}{path.name}")


def flush(path: Path) -> None:
    """Flush a file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(path: Path) -> None:
    """Flush the entries of a folder to disk, where the file system can; the files are complete in any case."""
    with suppress(OSError):
        flush(path)
