"""End a rank of a launch over Gloo whose launcher is gone, even if the host's agent is gone as well.

A rank on another host runs below that host's sshd; when the connection ends, so does sshd's process, and nobody tells
the rank. It notices that its parent, or its parent's parent, has changed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from hvdtrain.worker.proc_files import stat_of

INIT = 1
"""Id of the process that adopts orphans."""
POLL_SECONDS = 2.0
GRACE_SECONDS = 5.0


def ancestors(pid: int | None = None) -> tuple[int, int]:
    """Return the parent of a process (default: this one) and the parent's parent, as ids; 0 for one that has ended."""
    parent = os.getppid() if pid is None else _parent(pid)
    return parent, _parent(parent)


def end_when_orphaned() -> None:
    """Watch this process's ancestors; end its process group when they change, or if they have ended already."""
    watch(ancestors, _end_group, POLL_SECONDS)
    if INIT in ancestors():  # Ended before the watch began.
        _end_group()


def watch(look: Callable[[], object], end: Callable[[], None], seconds: float) -> threading.Thread:
    """Call `end` from a thread once `look`, polled every `seconds`, returns another value than now."""
    before = look()

    def poll() -> None:
        while look() == before:
            time.sleep(seconds)
        end()

    thread = threading.Thread(target=poll, daemon=True, name="hvdtrain-orphan")
    thread.start()
    return thread


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(stat_of(pid)[1])
    return 0


def _end_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)
