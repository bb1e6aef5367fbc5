"""A checkpoint is a folder that is complete or absent, whatever happens while it is written.

    step-000000120/
        arrays.safetensors    variables, as safetensors writes them
        ranks.bin             what each rank has of its own, as `collectives.encoding` writes it
        manifest.json         format version, facts, and size and checksum of the other two; written last

It is written under a temporary name. Each file is flushed to the disk, then the folder; only then is it renamed, and
the folder above flushed. So a name without a dot is a complete checkpoint, as long as the disk keeps what it has:
reading verifies that. Nothing is pickled.

It is written from where the variables lie in memory, without another copy of them. Checksums are XXH3's of 128 bits:
they find what a disk damages, at the speed of memory. SHA-256, which also withstands an attacker, took more than half
of the processor's time for a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load as read_arrays
from safetensors.numpy import save_file as write_arrays

from hvdtrain.collectives.encoding import decode, encode
from hvdtrain.collectives.finite import is_finite
from hvdtrain.errors import UsageError, warn_user

FORMAT = 1
ARRAYS, RANKS, MANIFEST = "arrays.safetensors", "ranks.bin", "manifest.json"
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


class Damaged(Exception):
    """A checkpoint is not as it was written; says which file and why."""


class Disk:
    """What is asked of the file system, one operation each: tests record them, and lose those that were not flushed."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def write_arrays(self, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Write them as safetensors, from where they lie in memory."""
        try:
            write_arrays(dict(arrays), path)
        except SafetensorError as error:
            raise OSError(f"{path.name}: {error}") from error

    def flush(self, path: Path) -> None:
        """Return when a file, or the names in a folder, will outlast a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path)


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
        OSError: it cannot be written; those before it are all there.
    """
    final = folder / f"{PREFIX}{number:09d}"
    temporary = folder / f"{UNFINISHED}{number:09d}"
    for left in folder.glob(f"{UNFINISHED}*"):
        disk.remove(left)
    # In the order of the state: safetensors has an order of its own.
    kinds = {name: array.dtype.name for name, array in checkpoint.arrays.items()}
    disk.make_folder(temporary)
    disk.write_arrays(temporary / ARRAYS, _packed(checkpoint.arrays))
    disk.write(temporary / RANKS, encode(checkpoint.ranks))
    content = {
        "format": FORMAT,
        "facts": dict(checkpoint.facts),
        "arrays": kinds,
        "files": {name: _size_and_checksum(temporary / name) for name in (ARRAYS, RANKS)},
    }
    for name in (ARRAYS, RANKS):
        disk.flush(temporary / name)
    disk.write(temporary / MANIFEST, _signed(content))
    disk.flush(temporary / MANIFEST)
    disk.flush(temporary)
    if final.exists():
        # Only after an older one was taken in place of this one, which was damaged then.
        disk.remove(final)
    disk.rename(temporary, final)
    disk.flush(folder)
    found = numbered(folder)
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
    warn_user(f"Checkpoint {name} is damaged: {error}. Using the one before it")


def warn_unsaved(step: int, why: object) -> None:
    """Warn that there is no checkpoint of the state after `step` steps, while training continues."""
    warn_user(
        f"No checkpoint was written after step {step}: {why}. Training continues; earlier checkpoints are kept"
    )


def is_worth_saving(
    step: int, arrays: Iterable[tuple[str, np.ndarray]], untrained: Collection[str] = ()
) -> bool:
    """Whether none of these weights, by name, holds nan or inf, from which no training recovers; warns if one does.

    The `untrained` may hold inf: masks, and bounds that have seen no data yet.
    """
    broken = next((name for name, a in arrays if not is_finite(a, name in untrained)), None)
    if broken is not None:
        warn_unsaved(step, f"{broken!r} holds nan or inf")
    return broken is None


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
    content = _verified(_bytes(path / MANIFEST))
    if content["format"] != FORMAT:
        raise UsageError(
            f"the checkpoint {path.name} has format {content['format']}, but this version of hvdtrain reads format "
            f"{FORMAT}: resume with the version that wrote it, or choose another folder"
        )
    files = {}
    for name, (size, checksum) in content["files"].items():
        files[name] = _bytes(path / name)
        if len(files[name]) != size:
            raise Damaged(f"{name} has {len(files[name])} of {size} bytes")
        if _checksum(files[name]) != checksum:
            raise Damaged(f"{name} does not match its checksum")
    try:
        arrays = _unpacked(files[ARRAYS], content["arrays"])
    except SafetensorError as error:
        raise Damaged(f"{ARRAYS}: {error}") from error
    return Checkpoint(content["facts"], arrays, decode(files[RANKS]))


def _packed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    # safetensors writes arrays that are not contiguous wrongly, and knows no bfloat16 of NumPy's.
    return {name: _bits(np.asarray(array, order="C")) for name, array in arrays.items()}


def _unpacked(data: bytes, kinds: Mapping[str, str]) -> dict[str, np.ndarray]:
    found = read_arrays(data)
    return {
        name: found[name].view(np.dtype(getattr(ml_dtypes, kind, kind)))
        for name, kind in kinds.items()
    }


def _bits(array: np.ndarray) -> np.ndarray:
    """Return types that NumPy itself does not have (kind V) as unsigned integers of their size."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _size_and_checksum(path: Path) -> list[Any]:
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        return [file.tell(), checksum]


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _signed(content: dict[str, Any]) -> bytes:
    """Return the manifest, with a checksum of itself behind it."""
    text = json.dumps(content).encode()
    return text + b"\n" + _checksum(text).encode()


def _verified(manifest: bytes) -> dict[str, Any]:
    text, _, checksum = manifest.rpartition(b"\n")
    if _checksum(text).encode() != checksum:
        raise Damaged(f"{MANIFEST} does not match its checksum")
    return json.loads(text)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from error
