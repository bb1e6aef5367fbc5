"""Reads and writes checkpoints: files that are complete or absent, whatever happens while they are written.

    step-000000120    a checksum of the rest, then format version, facts, variables and the state of each rank,
                      encoded by `collectives.encoding`

A file is written under a temporary name and flushed to the disk; then it is renamed, and the folder is flushed. So a
file whose name does not begin with a dot is complete. Reading verifies its checksum, as a disk may damage it later.
Nothing is pickled.

The thread that writes may share its only core with the training, so it must cost little: there is one file, written
from the variables' own memory, and the checksum, XXH3 of 128 bits, is about as fast as memory.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hvdtrain.collectives.encoding import decode, encoded_parts
from hvdtrain.collectives.finite import is_finite
from hvdtrain.errors import UsageError, warn_user
from hvdtrain.replaced_files import flush

FORMAT = 2
PREFIX, UNFINISHED = "step-", ".unfinished-"
NO_FLUSH_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP)
"""What file systems answer that cannot flush a folder."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        facts: Facts about the run and its position when the checkpoint was saved; JSON types.
        arrays: Variables by name, in their order.
        ranks: State of each rank, in the order of ranks, in types that `encoding.encode` accepts.
    """

    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    ranks: list[Any]


class NotFinite(OSError):
    """A weight is nan or inf: the checkpoint is not worth saving, as training does not recover from that."""


class Damaged(Exception):
    """A checkpoint differs from what was written; the message says how."""


class Disk:
    """The file system's operations, one per method, so that tests can record them and lose unflushed ones."""

    def write(self, path: Path, parts: Iterable[Any]) -> None:
        """Write bytes-like objects to a new file, one after the other."""
        with path.open("wb") as file:
            file.writelines(parts)

    def flush(self, path: Path) -> None:
        """Flush a file, or the names in a folder, so that a power failure does not lose it."""
        flush(path)

    def rename(self, path: Path, to: Path) -> None:
        path.replace(to)

    def remove(self, path: Path) -> None:
        path.unlink()


FILE_SYSTEM = Disk()


def save(
    folder: Path, number: int, checkpoint: Checkpoint, keep: int = 2, disk: Disk = FILE_SYSTEM
) -> Path:
    """Write a checkpoint, remove all but the last `keep` up to it, and return its path.

    Args:
        folder: Existing folder with all checkpoints of a run.
        number: Number of training steps so far; a checkpoint of the same number is replaced.
        checkpoint: Content to write.
        keep: Number of checkpoints to keep, with this one.
        disk: File system to use.

    Raises:
        OSError: If it cannot be written; names the file. Earlier checkpoints are kept, and no part of this one remains.
    """
    final = folder / f"{PREFIX}{number:09d}"
    temporary = folder / f"{UNFINISHED}{number:09d}"
    there = list(folder.iterdir())
    for left in there:
        if left.name.startswith(UNFINISHED):
            with suppress(OSError):  # Such as a folder; nothing reads it.
                disk.remove(left)
    parts = encoded_parts({"format": FORMAT, **vars(checkpoint)})
    try:
        disk.write(temporary, [_checksum(parts), *parts])
        disk.flush(temporary)
        disk.rename(temporary, final)
    except OSError as error:
        with suppress(OSError):
            disk.remove(temporary)  # Free the space: the disk may be full.
        error.filename = error.filename or str(final)
        raise
    # It is written, whatever fails from here on; a later save removes what remains.
    try:
        disk.flush(folder)
    except OSError as error:
        if error.errno not in NO_FLUSH_OF_FOLDERS:
            warn_user(
                f"{folder} cannot be flushed to the disk: {error}. Older checkpoints are kept"
            )
            return final
    found = newest_first({*there, final})
    here = found.index(final)
    # Newer ones are damaged: otherwise the training would have resumed from them.
    for other in found[:here] + found[here + keep :]:
        with suppress(OSError):
            disk.remove(other)
    return final


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint in `folder`, or None; warn of each damaged one on the way."""
    for path in numbered(folder):
        try:
            return load(path)
        except Damaged as error:
            warn_damaged(repr(str(path)), error)
    return None


def warn_damaged(name: str, error: Damaged) -> None:
    """Warn that the checkpoint `name` (its path in quotes, for instance) is skipped."""
    warn_user(f"Checkpoint {name} is damaged: {error}. Using the previous one")


def warn_unsaved(step: int, why: object) -> None:
    """Warn that no checkpoint was written after `step` steps; training continues."""
    warn_user(
        f"No checkpoint was written after step {step}: {why}. Training continues; earlier checkpoints are kept"
    )


def require_finite(
    arrays: Iterable[tuple[str, np.ndarray]], untrained: Collection[str] = ()
) -> None:
    """Raise NotFinite if a weight is nan or inf.

    Args:
        arrays: Names and values of the weights.
        untrained: Names of weights that no gradient changes. They may be inf, such as masks, and bounds before any
            data.
    """
    for name, array in arrays:
        if not is_finite(array, name in untrained):
            raise NotFinite(f"{name!r} contains nan or inf")


def numbered(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in `folder`, newest first."""
    return newest_first(folder.glob(f"{PREFIX}*"))


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return those of `paths` that have a checkpoint's name, newest first."""
    found = (p for p in paths if p.name.startswith(PREFIX) and p.name[len(PREFIX) :].isdecimal())
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the number of steps in the name of the checkpoint at `path`."""
    return int(path.name.removeprefix(PREFIX))


def load(path: Path) -> Checkpoint:
    """Read and verify the checkpoint at `path`.

    Raises:
        Damaged: If it cannot be read, or does not match its checksum.
        UsageError: If another version of hvdtrain wrote it in another format.
    """
    if (path / "manifest.json").exists():
        raise _other_format(path, 1)
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from error
    size = xxhash.xxh3_128().digest_size
    checksum, content = data[:size], data[size:]
    if not content or _checksum([content]) != checksum:
        raise Damaged("it does not match its checksum")
    found = decode(content)
    version = found.pop("format")
    if version != FORMAT:
        raise _other_format(path, version)
    return Checkpoint(**found)


def _other_format(path: Path, version: object) -> UsageError:
    return UsageError(
        f"the checkpoint {path.name} has format {version}, but this version of hvdtrain reads format {FORMAT}: "
        "resume with the version that wrote it, or choose another folder"
    )


def _checksum(parts: Sequence[Any]) -> bytes:
    checksum = xxhash.xxh3_128()
    for part in parts:
        checksum.update(part)
    return checksum.digest()
