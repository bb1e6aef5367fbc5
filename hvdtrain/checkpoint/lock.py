"""One run at a time writes to a folder of checkpoints."""

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
    """Return the descriptor of the folder's lock, which is free again when it is closed or this process ends.

    Args:
        folder: exists.
        name: of it, for the message.

    Raises:
        UsageError: it is locked; names the process that has it.
    """
    descriptor = lock_unless_own(folder, name)
    if descriptor is None:
        raise _in_use(name, this_process())
    return descriptor


def lock_unless_own(folder: Path, name: str) -> int | None:
    """As `lock_folder`; None if this process has locked it, such as in a training that failed in a notebook.

    Raises:
        UsageError: another process has locked it; names that one.
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
    """Let no process that this one forks, to read data for instance, hold the lock when this one has been killed."""
    mine = os.fstat(descriptor)

    def close() -> None:
        with contextlib.suppress(
            OSError
        ):  # Closed before; by now another file may have its number.
            if os.path.samestat(os.fstat(descriptor), mine):
                os.close(descriptor)

    os.register_at_fork(after_in_child=close)


def lock_kept(folder: Path, name: str, descriptor: int | None) -> int | None:
    """Return the descriptor of the folder's lock: a new one, in a new folder, if it was moved or removed since.

    Args:
        folder: that was locked.
        name: of it, for the message.
        descriptor: of its lock; None: it is not locked, and stays so.

    Raises:
        OSError: another run has begun in a folder of this name since.
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
    if again is None:  # This process has it: only the file system has counted anew.
        return descriptor
    if begun:
        os.close(again)
        raise OSError(
            f"this run's folder was moved or removed, and {name} now belongs to another run"
        )
    os.close(descriptor)
    return again


def this_process() -> str:
    """Return what tells this process from others: one of a container may have the number and host of one before."""
    begun = datetime.fromtimestamp(psutil.Process().create_time())
    return f"process {os.getpid()} on {socket.gethostname()} since {begun:%Y-%m-%d %H:%M:%S}"


def _in_use(name: str, owner: str) -> UsageError:
    return UsageError(f"{name} is in use by {owner}: choose another folder, or end that run first")
