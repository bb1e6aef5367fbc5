"""A checkpoint is a file that is complete or absent, whatever happens while it is written.

    step-000000120    a checksum of all that follows, and what `collectives.encoding` makes of format version, facts,
                      variables, and what each rank has of its own

It is written under a temporary name and flushed to the disk; only then is it renamed, and the folder flushed. So a
name without a dot is a complete checkpoint, as long as the disk keeps what it has: reading verifies that. Nothing is
pickled.

A worker may have no core to spare for the thread that writes, so that its processor time is the training's. Hence one
file, from where the variables lie in memory, and XXH3 of 128 bits, which finds what a disk damages at the speed of
memory.
"""

from __future__ import annotations

import os
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

FORMAT = 2
PREFIX, UNFINISHED = "step-", ".unfinished-"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        facts: what it was made of and where the training stood; JSON.
        arrays: the variables by name, in their order.
        ranks: what each rank has of its own, in the order of ranks; what `encoding.encode` takes.
    """

    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    ranks: list[Any]


class NotFinite(OSError):
    """A weight holds nan or inf, from which no training recovers: it is not worth saving."""


class Damaged(Exception):
    """A checkpoint is not as it was written; says why."""


class Disk:
    """What is asked of the file system, one operation each: tests record them, and lose those that were not flushed."""

    def write(self, path: Path, parts: Iterable[Any]) -> None:
        """Write bytes-like objects, one behind the other."""
        with path.open("wb") as file:
            file.writelines(parts)

    def flush(self, path: Path) -> None:
        """Return when a file, or the names in a folder, will outlast a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        path.replace(to)

    def remove(self, path: Path) -> None:
        path.unlink()


FILE_SYSTEM = Disk()


def save(
    folder: Path, number: int, checkpoint: Checkpoint, keep: int = 2, disk: Disk = FILE_SYSTEM
) -> Path:
    """Write `checkpoint` below `folder`, then remove all but the last `keep` up to it; return where it is.

    Args:
        folder: of all checkpoints of a run; exists.
        number: of training steps so far. One of the same number is replaced.
        checkpoint: what to write.
        keep: checkpoints, this one included.
        disk: the file system.

    Raises:
        OSError: it cannot be written; names the file. Those before it are all there, and nothing else is.
    """
    final = folder / f"{PREFIX}{number:09d}"
    temporary = folder / f"{UNFINISHED}{number:09d}"
    there = list(folder.iterdir())
    for left in there:
        if left.name.startswith(UNFINISHED):
            disk.remove(left)
    parts = encoded_parts({"format": FORMAT, **vars(checkpoint)})
    try:
        disk.write(temporary, [_checksum(parts), *parts])
        disk.flush(temporary)
        disk.rename(temporary, final)
        disk.flush(folder)
    except OSError as error:
        with suppress(OSError):
            disk.remove(temporary)  # On a full disk others have use for the room.
        error.filename = error.filename or str(final)
        raise
    found = newest_first({*there, final})
    here = found.index(final)
    # Newer ones were damaged: the training would have gone on from them.
    for other in found[:here] + found[here + keep :]:
        disk.remove(other)
    return final


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint below `folder` that is as it was written; None if there is none.

    Damaged ones are warned of, and passed over.
    """
    for path in numbered(folder):
        try:
            return load(path)
        except Damaged as error:
            warn_damaged(repr(str(path)), error)
    return None


def warn_damaged(name: str, error: Damaged) -> None:
    """Warn that the checkpoint `name`, such as its path in quotes, is passed over."""
    warn_user(f"Checkpoint {name} is damaged: {error}. Using the previous one")


def warn_unsaved(step: int, why: object) -> None:
    """Warn that there is no checkpoint of the state after `step` steps, while training continues."""
    warn_user(
        f"No checkpoint was written after step {step}: {why}. Training continues; earlier checkpoints are kept"
    )


def require_finite(
    arrays: Iterable[tuple[str, np.ndarray]], untrained: Collection[str] = ()
) -> None:
    """Raise NotFinite if one of these weights, by name, holds nan or inf.

    The `untrained` may hold inf: masks, and bounds that have seen no data yet.
    """
    for name, array in arrays:
        if not is_finite(array, name in untrained):
            raise NotFinite(f"{name!r} contains nan or inf")


def numbered(folder: Path) -> list[Path]:
    """Return the checkpoints below `folder`, newest first."""
    return newest_first(folder.glob(f"{PREFIX}*"))


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return those of `paths` that are named as checkpoints, newest first."""
    found = (p for p in paths if p.name.startswith(PREFIX) and p.name[len(PREFIX) :].isdecimal())
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the number of the checkpoint at `path`."""
    return int(path.name.removeprefix(PREFIX))


def load(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`.

    Raises:
        Damaged: it is not as it was written.
        UsageError: another version of hvdtrain wrote it.
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
