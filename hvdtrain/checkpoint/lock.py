"""A lock that lets only one run at a time write to a folder of checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from datetime import datetime
from pathlib import Path

import psutil

from hvdtrain.errors import UsageError

LOCK = "lock"


def lock_folder(folder: Path, name: str) -> int:
    """Lock a folder; return the descriptor of the lock, which ends when it is closed or this process exits.

    Args:
        folder: Existing folder.
        name: Name of the folder in the message.

    Raises:
        UsageError: If it is locked; names the process that holds the lock.
    """
    descriptor = lock_unless_own(folder, name)
    if descriptor is None:
        raise _in_use(name, this_process())
    return descriptor


def lock_unless_own(folder: Path, name: str) -> int | None:
    """Lock a folder as `lock_folder` does; return None if this process already holds the lock.

    A training that failed in a notebook may still hold it.

    Raises:
        UsageError: If another process holds the lock; names it.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 1000).decode(errors="replace") or "another process"
        os.close(descriptor)
        if owner == this_process():
            return None
        raise _in_use(name, owner) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, this_process().encode())
    _keep_from_forks(descriptor)
    return descriptor


def _keep_from_forks(descriptor: int) -> None:
    """Close the descriptor in processes that this one forks: they could hold the lock after it is killed."""
    mine = os.fstat(descriptor)

    def close() -> None:
        with contextlib.suppress(
            OSError
        ):  # It may be closed already, and its number may belong to another file.
            if os.path.samestat(os.fstat(descriptor), mine):
                os.close(descriptor)

    os.register_at_fork(after_in_child=close)


def lock_kept(folder: Path, name: str, descriptor: int | None) -> int | None:
    """Return the descriptor of a lock held on the folder; lock it again if it was moved or removed.

    Args:
        folder: Folder that was locked; created again if it is missing.
        name: Name of the folder in the message.
        descriptor: Descriptor of its lock; None: the folder was not locked, and stays so.

    Raises:
        OSError: If another run has begun in a folder of this name.
    """
    if descriptor is None:
        return None
    begun = (folder / LOCK).exists()
    if begun and os.path.samestat((folder / LOCK).stat(), os.fstat(descriptor)):
        return descriptor
    folder.mkdir(parents=True, exist_ok=True)
    try:
        again = lock_unless_own(folder, name)
    except UsageError as error:
        raise OSError(f"this run's folder was moved or removed, and {error}") from error
    if again is None:  # This process holds it: the file system has only renumbered its files.
        return descriptor
    if begun:
        os.close(again)
        raise OSError(
            f"this run's folder was moved or removed, and {name} now belongs to another run"
        )
    os.close(descriptor)
    return again


def this_process() -> str:
    """Return a text that identifies this process; a PID and host name alone may recur in a new container."""
    begun = datetime.fromtimestamp(psutil.Process().create_time())
    return f"process {os.getpid()} on {socket.gethostname()} since {begun:%Y-%m-%d %H:%M:%S}"


def _in_use(name: str, owner: str) -> UsageError:
    return UsageError(f"{name} is in use by {owner}: choose another folder, or end that run first")
