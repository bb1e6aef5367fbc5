"""What Horovod's own tests of its TensorFlow module ask for, on two ranks; see test_collectives.py as well."""

import pytest
from launch import MPI_OR_GLOO_IN_ALL, Results, on_ranks


@pytest.fixture(scope="module", params=MPI_OR_GLOO_IN_ALL)
def results(request: pytest.FixtureRequest) -> Results:
    return on_ranks("horovod_tensorflow", controller=request.param)


@pytest.mark.parametrize(
    "case", [pytest.param("case_indexed_slices", marks=pytest.mark.slow), "case_broadcast_in_place"]
)
def test_exact(results: Results, case: str) -> None:
    for found in results.of(case):
        # Small whole numbers, and halves of them: exact in every dtype.
        assert {name: apart for name, apart in found.items() if apart > 0} == {}


def test_join(results: Results) -> None:
    for *found, in_a_graph in results.of("case_join"):
        assert found.count(True) == 30  # rounds; each names who came last
        alone = [each for each in found if each is not True]
        assert alone == [[0.0, 0.0, 0.0, True]] * 15
        assert in_a_graph == "UsageError: join: call it outside tf.function, between two steps"


def test_queries_in_a_graph(results: Results) -> None:
    assert results.of("case_queries_in_a_graph") == [True, True]


def test_compression(results: Results) -> None:
    assert results.of("case_compression") == [[], []]


def test_objects(results: Results) -> None:
    assert results.of("case_objects") == [[True, True]] * 2


def test_elastic_variables(results: Results) -> None:
    synced, committed = [[1.0, 1.0], 20, 10], [[0.0, 0.0], 21, 11]
    assert results.of("case_elastic_variables") == [[synced, synced, committed]] * 2


@pytest.mark.slow
def test_model_parallel(results: Results) -> None:
    for found in results.of("case_model_parallel"):
        # float64, in another order of summation.
        assert max(found.values()) < 1e-12
