"""The bytes of collectives, passed on from rank to rank over sockets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdtrain.bench.sockets import COLLECTIVES, Ring

RANKS = 3
BYTES = 3 << 20


@pytest.fixture
def rings() -> list[Ring]:
    ports = [0] * RANKS
    everyone = threading.Barrier(RANKS)

    def connect(rank: int) -> Ring:
        def gather(port: int) -> list[int]:
            ports[rank] = port
            everyone.wait(10)
            return ports

        return Ring.connect(rank, RANKS, gather)

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(connect, range(RANKS)))


def test_a_step_passes_the_data_to_the_next_rank(rings: list[Ring]) -> None:
    received = [bytearray(BYTES) for _ in rings]
    with ThreadPoolExecutor(RANKS) as threads:
        list(
            threads.map(
                lambda ring: ring.step(
                    memoryview(bytes([ring.rank + 1]) * BYTES), memoryview(received[ring.rank])
                ),
                rings,
            )
        )
    assert [set(one) for one in received] == [{3}, {1}, {2}]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_all_ranks_pass_on_as_many_bytes_as_they_await(name: str, rings: list[Ring]) -> None:
    with ThreadPoolExecutor(RANKS) as threads:
        done = [threads.submit(ring.calls(name, 1000), 3) for ring in rings]
        for one in done:
            one.result(10)
