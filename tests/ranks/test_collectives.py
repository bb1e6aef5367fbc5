"""Every collective of hvdtrain.keras on two ranks: values, gradients, dtypes, process sets, errors."""

import pytest
from launch import MPI_OR_SLOW_GLOO, Results, on_ranks


@pytest.fixture(scope="module", params=MPI_OR_SLOW_GLOO)
def results(request: pytest.FixtureRequest) -> Results:
    return on_ranks("collectives", controller=request.param)


@pytest.mark.slow
def test_values_and_gradients(results: Results) -> None:
    for found in results.of("case_values_and_gradients"):
        # Small integers: float32 and what is compressed hold them, their sums and their means exactly.
        assert {name: gaps for name, gaps in found.items() if max(gaps) > 0} == {}


@pytest.mark.slow
def test_dtypes_and_dimensions(results: Results) -> None:
    for found in results.of("case_dtypes_and_dimensions"):
        assert {name: gap for name, gap in found.items() if gap > 0} == {}


@pytest.mark.slow
def test_a_loss_over_the_examples_of_all_ranks(results: Results) -> None:
    for found in results.of("case_contrastive_loss"):
        # float32, in another order of summation.
        assert max(found.values()) < 1e-6


def test_a_gradient_of_a_gradient(results: Results) -> None:
    assert results.of("case_gradient_of_a_gradient") == [[54.0, 72.0]] * 2


def test_sparse_and_mixed(results: Results) -> None:
    for found in results.of("case_sparse_and_mixed"):
        assert found == {
            "sum of slices": [[3.0, 3.0], [2.0, 2.0], [0.0, 0.0]],
            "mean of slices": [[[2.0, 2.0], [4.0, 4.0], [4.0, 4.0]], [0, 0, 1]],
            "a group of all kinds": [[2.0], [4], [6.0]],
            "an empty group": [],
            "received splits": [1, 1],
        }


def test_queries(results: Results) -> None:
    assert results.of("case_queries") == [[True, 1, True]] * 2


def test_process_sets(results: Results) -> None:
    for found in results.of("case_process_sets"):
        assert found.pop("included") == [True, False, 0, 1]
        assert found.pop("removed") == [True, True]
        assert "is not a member of the provided process set" in found.pop("not included")
        assert "invalid root rank" in found.pop("root outside")
        assert set(found.values()) == {0.0}, found


def test_errors_on_both_ranks(results: Results) -> None:
    for found in results.of("case_errors"):
        assert found.pop("afterwards") == "2.0"
        assert {name: said for name, said in found.items() if said.startswith("no error")} == {}


def test_refused_before_anything_travels(results: Results) -> None:
    assert results.of("case_usage_errors") == [[], []]
