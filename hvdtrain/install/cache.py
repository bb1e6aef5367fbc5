"""Cache of built wheels outside the clone: <cache>/wheels/<key>/<wheel>, and the logs of their builds.

A wheel appears complete or not at all (it is copied under another name, then renamed). Only one process at a time works
on a key. A wheel whose contents do not match its own checksums (it is a zip file) counts as absent.
"""

import fcntl
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click

from hvdtrain.errors import HvdtrainError


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return HVDTRAIN_CACHE, or hvdtrain in the user's cache folder."""
    named = environment.get("HVDTRAIN_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    user = environment.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "hvdtrain"


def is_whole(wheel: Path) -> bool:
    """Return whether all files in the wheel match their checksums (CRC-32)."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    # A damaged header may contain an unknown compression method, and a damaged stream may end early.
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return False


class WheelCache:
    """Cache of wheels and build logs in a folder (see the module)."""

    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.logs = folder / "logs"

    def find(self, key: str) -> Path | None:
        """Return the wheel kept under `key`, if it is intact."""
        wheels = sorted((self.wheels / key).glob("*.whl"))
        return wheels[0] if len(wheels) == 1 and is_whole(wheels[0]) else None

    def keep(self, key: str, wheel: Path) -> Path:
        """Copy `wheel` to the cache under `key`, replacing an older one. The caller holds the lock."""
        kept = self.wheels / key / wheel.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside = kept.with_name(f"{wheel.name}.part")
        try:
            shutil.copyfile(wheel, beside)
            beside.replace(kept)
        finally:
            beside.unlink(missing_ok=True)
        return kept

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Lock `key` for the duration of the context, waiting with a message if another process holds it.

        Raises:
            HvdtrainError: The cache cannot be written.
        """
        try:
            self.wheels.mkdir(parents=True, exist_ok=True)
            file = (self.wheels / f".{key}.lock").open("w")
        except OSError as error:
            raise HvdtrainError(
                f"cannot write to the cache {self.wheels}: {error.strerror}; set HVDTRAIN_CACHE to "
                "a folder that you can write to"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                click.echo("Another process is building the same wheel: waiting for it ...")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
