"""Bandwidths of collectives, as nccl-tests defines them."""

import pytest

from hvdtrain.bench.bandwidth import Timing
from hvdtrain.bench.sockets import ring_steps


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("allreduce", 1.5),  # 2 (n - 1) / n
        ("allgather", 0.75),  # (n - 1) / n
        ("reducescatter", 0.75),
        ("alltoall", 0.75),
        ("broadcast", 1.0),
    ],
)
def test_bandwidths_on_four_ranks(name: str, factor: float) -> None:
    timing = Timing(name, ranks=4, bytes=1000, horovod=0.5, raw=0.1, copy=1.0)
    assert timing.bandwidth(timing.horovod) == 2000
    assert timing.bus_bandwidth(timing.horovod) == 2000 * factor
    assert ring_steps(name, 4) == 4 * factor
