"""Whole writes to pipes and terminals: the launch wing and the ranks share it."""

import os
import select


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
