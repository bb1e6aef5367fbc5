"""The bytes of a collective through bare TCP sockets: the limit of what Gloo, which has no other transport, can reach.

In each step of a ring algorithm, a rank sends a part of the data to the next rank and receives one from the previous
rank. Nothing is added up or copied.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass

COLLECTIVES = ("allreduce", "allgather", "reducescatter", "broadcast", "alltoall")
LOCAL = "127.0.0.1"


def ring_steps(name: str, ranks: int) -> int:
    """Return the number of steps in which the ranks pass on a part of the data: all of it, once, for a broadcast."""
    if name == "broadcast":
        return ranks
    return 2 * (ranks - 1) if name == "allreduce" else ranks - 1


@dataclass(frozen=True)
class Ring:
    """Connections of one rank, on one machine."""

    rank: int
    size: int
    following: socket.socket
    previous: socket.socket

    @classmethod
    def connect(cls, rank: int, size: int, gather: Callable[[int], list[int]]) -> Ring:
        """Connect all ranks; `gather` returns the numbers of all ranks, given this one's. A collective."""
        with socket.create_server((LOCAL, 0)) as server:
            ports = gather(server.getsockname()[1])
            following = socket.create_connection((LOCAL, ports[(rank + 1) % size]))
            previous, _ = server.accept()
        for connection in (following, previous):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        return cls(rank, size, following, previous)

    def calls(self, name: str, each: int) -> Callable[[int], None]:
        """Return a function that passes the bytes of a collective, `each` for a rank's part, as often as it is told."""
        is_broadcast = name == "broadcast"
        # Each rank passes all of a broadcast on at once.
        steps, part = (1, each * self.size) if is_broadcast else (ring_steps(name, self.size), each)
        sends = not is_broadcast or self.rank < self.size - 1
        receives = not is_broadcast or self.rank > 0
        out = memoryview(bytes(part if sends else 0))
        into = memoryview(bytearray(part if receives else 0))

        def call(count: int) -> None:
            for _ in range(count * steps):
                self.step(out, into)

        return call

    def step(self, out: memoryview, into: memoryview) -> None:
        """Send `out` to the next rank, and fill `into` with what the previous one sends."""
        while out or into:
            reading, writing, _ = select.select(
                [self.previous] if into else [], [self.following] if out else [], []
            )
            if writing:
                out = out[self.following.send(out) :]
            if reading:
                into = into[self.previous.recv_into(into) :]
