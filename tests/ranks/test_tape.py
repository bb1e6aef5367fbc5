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


def test_in_fit(results: Results) -> None:
    """A train_step with a tape and a plain optimizer: files, errors and ends as with a DistributedOptimizer."""
    both = results.of("case_in_fit")
    for rank, found in enumerate(both):
        saved = [f"{epoch}.weights.h5" for epoch in (1, 2, 3)]
        assert found["files"] == [*saved, "backup", "board-0", "log-0.csv"]
        assert found["epochs"] == [[0, 1], [2]]
        assert [line.split(",")[0] for line in found["log"]] == ["epoch", "0", "1", "2"]
        assert found["after nan"] == [[0, 1], [0]]
        assert "drifted apart after epoch 1" in found["other weights"]
        assert '["MetricAverageCallback"] on rank 0 and [] on rank 1' in found["callback on rank 0"]
        assert "callback CSVLogger: " in found["no folder"] and "missing" in found["no folder"]
        own = [f"{epoch}.weights.h5" for epoch in range(1, rank + 2)]
        assert found["plain"] == [*own, "backup", f"board-{rank}", f"log-{rank}.csv"]
        assert found["summaries"] == list(range(1, 2 * rank + 3))  # two steps in an epoch
    first, second = both
    assert first["shared kernel"] == second["shared kernel"]
    assert abs(first["own kernel of the ranks"] - second["own kernel of the ranks"]) > 1e-3
