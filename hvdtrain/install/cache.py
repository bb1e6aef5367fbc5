"""Built wheels, kept outside the clone: <cache>/wheels/<key>/<wheel> and <wheel>.sha256.

A folder appears complete or not at all (it is filled beside its place, then renamed), one process at a time works
on a key, and a wheel whose bytes are not those of its sha256 file counts as absent.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.errors import HvdtrainError


def cache_folder(environment: Mapping[str, str]) -> Path:
    """HVDTRAIN_CACHE, or hvdtrain in the user's cache folder."""
    named = environment.get("HVDTRAIN_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    user = environment.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "hvdtrain"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class WheelCache:
    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.logs = folder / "logs"

    def find(self, key: str) -> Path | None:
        """The wheel that was kept under `key`, if it is whole."""
        wheels = sorted((self.wheels / key).glob("*.whl"))
        if len(wheels) != 1:
            return None
        checksum = _checksum_file(wheels[0])
        if not checksum.is_file() or checksum.read_text().strip() != sha256_of(wheels[0]):
            return None
        return wheels[0]

    def keep(self, key: str, wheel: Path) -> Path:
        """Copy `wheel` in under `key`, in place of what was there. The caller holds the lock."""
        self.wheels.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=self.wheels))
        try:
            kept = Path(shutil.copy2(wheel, staging))
            _checksum_file(kept).write_text(sha256_of(wheel) + "\n")
            for path in staging.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            staging.chmod(0o755)
            place = self.wheels / key
            if place.exists():
                shutil.rmtree(place)
            staging.rename(place)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return place / wheel.name

    @contextmanager
    def lock(self, key: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold `key` for this process. Calls `on_wait` once if another one has it; ends with the process."""
        try:
            self.wheels.mkdir(parents=True, exist_ok=True)
            file = (self.wheels / f".{key}.lock").open("w")
        except OSError as error:
            raise HvdtrainError(
                f"cannot write to the cache {self.wheels}: {error.strerror}; set HVDTRAIN_CACHE to a "
                "folder of yours"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _checksum_file(wheel: Path) -> Path:
    return wheel.with_name(wheel.name + ".sha256")
