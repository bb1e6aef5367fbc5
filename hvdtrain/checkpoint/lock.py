"""One run at a time writes to a folder of checkpoints."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from hvdtrain.errors import UsageError

LOCK = "lock"


def lock_folder(folder: Path, name: str) -> int:
    """Return the descriptor of the folder's lock, which is free again when it is closed or this process ends.

    Args:
        folder: exists.
        name: of it, for the message.

    Raises:
        UsageError: another process has it; names that one.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 1000).decode(errors="replace") or "another process"
        os.close(descriptor)
        raise UsageError(
            f"{name} is in use by {owner}: choose another folder, or end that run first"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor
