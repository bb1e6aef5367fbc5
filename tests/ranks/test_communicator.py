"""The communicator on Horovod's ranks: every dtype, eagerly and in graphs."""

from __future__ import annotations

import pytest
from launch import MPI_OR_SLOW_GLOO, Results, on_ranks


@pytest.fixture(scope="module", params=MPI_OR_SLOW_GLOO)
def results(request: pytest.FixtureRequest) -> Results:
    return on_ranks("communicator", np=2, controller=request.param)


@pytest.mark.slow
def test_every_dtype_comes_back_as_numpy_computes_it(results: Results) -> None:
    assert results.of("case_collectives") == [[], []]


def test_a_constant_is_not_reduced_ahead(results: Results) -> None:
    # 1 + 1 + 10 and 1 + 2 + 20
    assert results.of("case_constants") == [[12.0, 23.0]] * 2


def test_exchange(results: Results) -> None:
    everyone = [{"rank": 0, "text": ""}, {"rank": 1, "text": "ä" * 300}]
    assert results.of("case_exchange") == [[2, [0, 1], everyone]] * 2
