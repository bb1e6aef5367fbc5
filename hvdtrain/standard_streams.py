"""Standard streams: open those that the parent process closed, and write all bytes to a descriptor."""

import os
import select
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_streams() -> None:
    """Open closed standard streams (`>&-`) on the null device.

    Otherwise the next file or pipe would get the stream's number, and output for the user would be written to it.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # Takes the lowest number, which is free.
            os.set_inheritable(nowhere, True)
        if getattr(sys, name) is None:
            # Stays open until the process ends.
            setattr(sys, name, open(number, mode, errors="surrogateescape", closefd=False))  # noqa: SIM115


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, waiting for the reader even if another process has set the descriptor to non-blocking.

    Raises:
        OSError: A write failed.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
