"""The standard streams: open where a parent left them closed, and written to as a whole."""

import os
import select
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


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte. Waits for the reader, also where another process has set the descriptor to non-blocking.

    Raises OSError.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
