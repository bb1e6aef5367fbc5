"""Copies a run's checkpoints to a storage that fsspec supports (s3://, gs://), in case the machine is lost.

A checkpoint is copied under a temporary name and then moved. If a storage does not move files atomically and the
machine is lost meanwhile, a partial file does not match its checksum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hvdtrain.checkpoint.folder import (
    PREFIX,
    UNFINISHED,
    Damaged,
    load,
    newest_first,
    step_of,
    warn_damaged,
)
from hvdtrain.errors import UsageError


class MirrorError(OSError):
    """A checkpoint could not be copied to the storage; it is complete in its local folder."""


class Mirror:
    """The checkpoints at a URL; only rank 0 uses it.

    Args:
        url: URL of a folder for this run alone. Credentials come from the environment or the storage's configuration.
        keep: Number of checkpoints to keep there.

    Raises:
        UsageError: If fsspec or its package for this storage is not installed, or the URL holds a user name or
            password.
    """

    def __init__(self, url: str, keep: int) -> None:
        self.url = url.rstrip("/")
        self._keep = keep
        if "@" in urlsplit(url).netloc:
            raise UsageError(
                "Checkpoints(mirror=...): the URL contains a user name or password: pass credentials through the "
                "environment or the configuration of the storage instead"
            )
        self._storage, self._root = _storage_of(self.url)

    def copy(self, checkpoint: Path) -> None:
        """Copy a complete checkpoint to the storage, and remove all but the last `keep` up to it.

        Raises:
            MirrorError: If it cannot be copied; earlier checkpoints there are kept.
        """
        try:
            self._copy(checkpoint)
        except Exception as error:  # Each storage raises its own exceptions.
            raise MirrorError(f"{type(error).__name__}: {error}") from error

    def fetch(self, folder: Path, steps: int) -> bool:
        """Fetch the newest undamaged checkpoint of the storage into `folder`, if it has more than `steps` steps.

        Args:
            folder: Folder for it, which this process has locked.
            steps: Steps of the newest undamaged checkpoint in the folder; -1 if it has none.

        Returns:
            Whether a checkpoint was fetched.

        Raises:
            UsageError: If the storage cannot be read; a run that started from scratch would replace its checkpoints.
        """
        try:
            there = (name for name in self._names() if step_of(Path(name)) > steps)
            return any(self._fetch(name, folder) for name in there)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"Checkpoints(mirror={self.url!r}) cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _copy(self, checkpoint: Path) -> None:
        temporary = f"{self._root}/{UNFINISHED}{checkpoint.name}"
        self._storage.makedirs(self._root, exist_ok=True)
        for left in self._files():
            if left.name.startswith(UNFINISHED):  # Left by a failed copy.
                self._storage.rm_file(f"{self._root}/{left.name}")
        self._storage.put_file(str(checkpoint), temporary)
        self._storage.mv(temporary, f"{self._root}/{checkpoint.name}")
        names = self._names()
        here = names.index(checkpoint.name)
        # Newer ones are damaged or were not fetched: otherwise the training would have resumed from them.
        for other in names[:here] + names[here + self._keep :]:
            self._storage.rm_file(f"{self._root}/{other}")

    def _fetch(self, name: str, folder: Path) -> bool:
        """Fetch the checkpoint `name` into `folder`; return whether it is undamaged."""
        temporary = folder / f"{UNFINISHED}{name.removeprefix(PREFIX)}"
        self._storage.get_file(f"{self._root}/{name}", str(temporary))
        try:
            load(temporary)
        except Damaged as error:
            warn_damaged(f"{name!r} in {self.url!r}", error)
            return False
        temporary.replace(folder / name)
        return True

    def _names(self) -> list[str]:
        """Return the names of the complete checkpoints, newest first."""
        return [path.name for path in newest_first(self._files())]

    def _files(self) -> list[Path]:
        self._storage.invalidate_cache()
        if not self._storage.exists(self._root):
            return []
        return [Path(name) for name in self._storage.ls(self._root, detail=False)]


def _storage_of(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for `url`, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise UsageError(
            f"Checkpoints(mirror={url!r}) needs fsspec: pip install 'hvdtrain[cloud]'"
        ) from None
    try:
        storage, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"Checkpoints(mirror={url!r}): {error}") from error
    return storage, str(path).rstrip("/")
