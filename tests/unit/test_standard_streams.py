"""Whole writes, whatever state another process has left the descriptor in."""

import os
import threading
import time

from hvdtrain.standard_streams import write_all


def test_a_slow_reader_of_a_descriptor_that_does_not_wait() -> None:
    """ssh sets its standard streams to that, and all that share them have it so."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    data = os.urandom(1_000_000)
    read = bytearray()

    def reader() -> None:
        time.sleep(0.1)
        while part := os.read(reading, 50_000):
            read.extend(part)

    thread = threading.Thread(target=reader)
    thread.start()
    write_all(writing, data)
    os.close(writing)
    thread.join()
    os.close(reading)
    assert bytes(read) == data
