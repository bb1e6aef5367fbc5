"""DistributedGradientTape on real ranks."""

from __future__ import annotations

import pytest
from launch import MPI_OR_GLOO_IN_ALL, Results, on_ranks


@pytest.fixture(scope="module", params=MPI_OR_GLOO_IN_ALL)
def results(request: pytest.FixtureRequest) -> Results:
    return on_ranks("tape", np=2, controller=request.param)


def test_equals_one_process(results: Results) -> None:
    for found in results.of("case_equals_one_process"):
        assert max(found.values()) <= 2e-6


def test_structures(results: Results) -> None:
    for found in results.of("case_structures"):
        for gradients in found.values():
            assert gradients == [[1.5, 1.5], [0.5], [1.5, 3.0], True]


def test_persistent_and_twice(results: Results) -> None:
    for found in results.of("case_persistent_and_twice"):
        assert found["gradients"] == [1.5, 15.0, 150.0, 150.0, 1500.0]


def test_local_sources(results: Results) -> None:
    for rank, found in enumerate(results.of("case_local_sources")):
        assert found == {"True": [(rank + 1) / 2, 1.5], "False": [rank + 1, 1.5]}


def test_shapes_differ_between_ranks(results: Results) -> None:
    assert max(results.of("case_shapes_differ_between_ranks")) <= 1e-6
