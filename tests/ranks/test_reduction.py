"""The reduction of single gradients on real ranks."""

from __future__ import annotations

import math

import pytest
from launch import Results, on_ranks

ROUNDINGS = {
    "none": 1e-6,
    # Each rank's gradient is rounded to 11 bits, the sum once more.
    "fp16": 2 * 2.0**-11,
    # 8 bits: 2**-9 for each rank's gradient and for the sum.
    "bf16": 2 * 2.0**-9,
}


KINDS = (
    (2, "mpi"),
    pytest.param((2, "gloo"), marks=pytest.mark.all_cases),
    pytest.param((3, "gloo"), marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def results(request: pytest.FixtureRequest) -> Results:
    np, controller = request.param
    return on_ranks("reduction_of_gradients", np=np, controller=controller)


@pytest.mark.slow
def test_compression(results: Results) -> None:
    for found in results.of("case_compression"):
        for name, limit in ROUNDINGS.items():
            # The largest entry of the average can be smaller than that of the ranks' gradients.
            assert found[name] <= 2 * limit
        assert found["bf16"] > ROUNDINGS["none"]  # it was compressed


def test_bf16_with_other_options(results: Results) -> None:
    for found in results.of("case_bf16_options"):
        assert max(found.values()) <= 2 * ROUNDINGS["bf16"]


def test_range(results: Results) -> None:
    for found in results.of("case_range"):
        assert found["none"] == 1e6
        assert math.isinf(found["fp16"])
        assert found["bf16"] == pytest.approx(1e6, rel=2.0**-8)


def test_own_compressor(results: Results) -> None:
    assert max(results.of("case_own_compressor")) <= 1e-6


def test_sparse(results: Results) -> None:
    for found in results.of("case_sparse"):
        assert max(found.values()) <= 1e-6


def test_dtypes(results: Results) -> None:
    for found in results.of("case_dtypes"):
        assert max(found.values()) == 0


def test_adasum() -> None:
    # It needs MPI and a power of two of ranks.
    assert max(on_ranks("reduction_of_gradients").of("case_adasum")) <= 1e-6
