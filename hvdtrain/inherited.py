"""What a parent may leave to a process that the process cannot work with."""

import contextlib
import os
import signal
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_streams() -> None:
    """Open the standard streams that are closed (`>&-`), to nowhere.

    Else the next files and pipes that are opened take their numbers, and what is meant for the user is written there.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # Takes the lowest number, which is free.
            os.set_inheritable(nowhere, True)
        if getattr(sys, name) is None:
            # The process ends with it: nothing closes it before.
            setattr(sys, name, open(number, mode, errors="surrogateescape", closefd=False))  # noqa: SIM115


def heed_children() -> None:
    """An ignored SIGCHLD (`trap '' CHLD`) makes the system forget how children ended."""
    with contextlib.suppress(ValueError):  # Not in the main thread.
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
