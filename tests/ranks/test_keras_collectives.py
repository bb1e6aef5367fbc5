"""The collectives of hvdtrain.keras, SyncBatchNormalization and load_model on two ranks."""

import pytest
from launch import MPI_OR_GLOO_IN_ALL, Results, on_ranks


@pytest.fixture(scope="module", params=MPI_OR_GLOO_IN_ALL)
def results(request: pytest.FixtureRequest) -> Results:
    return on_ranks("keras_collectives", np=2, controller=request.param)


def test_eager_collectives(results: Results) -> None:
    ranks = results.of("case_eager_collectives")
    scattered = [rank.pop("scatter") for rank in ranks], [rank.pop("scatter sum") for rank in ranks]
    assert scattered == ([[[0.5]], [[10.5]]], [[[1.0]], [[21.0]]])
    assert ranks[0] == ranks[1]
    refused = ranks[0].pop("one rank cannot send")
    assert "rank 0 cannot send this to the other ranks: it is a builtins.module" in refused
    assert ranks[0] == {
        "average": [0.5, 1.0],
        "sum": 6,
        "average=False": 2.0,
        "max": 1.0,
        "min": 0.0,
        "product": 6.0,
        "scaled": 1.5,
        "variable": [0.5, 2.0],
        "fp16": 1.5,
        "bf16": [1.5],
        "bf16 sum": 12.0,
        "bf16 of integers": 2000,
        "bfloat16": "bfloat16",
        "gather": [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
        "gather bfloat16": [0.0, 1.0],
        "a sum as in horovod.tensorflow": "allreduce: name=False: pass a str (for a mean or sum, average=False)",
        "gather a scalar": "allgather: expected at least one dimension, such as [value], not a scalar",
        "broadcast": [1.0, 2.0],
        "broadcast bool": True,
        "object": {"epoch": 1, "name": "a"},
        "objects": [[0], [1]],
        "object as it was": "{0: [1, (2, b'3')], None: array([0, 1])}",
    }


@pytest.mark.slow
def test_collectives_in_a_graph(results: Results) -> None:
    root, other = (rank["values"] for rank in results.of("case_graph_collectives"))
    assert root == [2.0, 1.0, [2.0, 2.0], 3.0, [[2.0]]]
    assert other == [2.0, 1.0, [2.0, 2.0], 3.0, [[4.0]]]


def test_sync_batch_norm_equals_one_process(results: Results) -> None:
    for gaps in results.of("case_sync_batch_norm_equals_one_process"):
        synchronized = [gap for name, gap in gaps.items() if name.startswith("Sync")]
        plain = [gap for name, gap in gaps.items() if name.startswith("Batch")]
        assert max(synchronized) < 1e-5, gaps
        assert min(plain) > 1e-2, gaps


@pytest.mark.slow
def test_sync_batch_norm_with_uneven_batches(results: Results) -> None:
    for found in results.of("case_sync_batch_norm_uneven"):
        assert found["gap"] < 1e-5
        assert found["equal"]


def test_sync_batch_norm_moments(results: Results) -> None:
    for gaps in results.of("case_sync_batch_norm_moments"):
        large = gaps.pop("large mean")
        assert large < 1e-3  # float32 holds 1000 to 3e-5
        assert max(gaps.values()) < 1e-5, gaps


def test_inference_needs_no_other_rank(results: Results) -> None:
    assert results.of("case_inference_needs_no_other_rank") == ["done", "done"]


def test_xla_is_turned_off_for_sync_batch_norm(results: Results) -> None:
    assert results.of("case_automatic_jit_is_off") == [False, False]


@pytest.mark.slow
def test_a_loaded_model_goes_on_as_if_never_saved(results: Results) -> None:
    for gaps in results.of("case_load_model_goes_on"):
        assert gaps == {"keras": 0.0, "h5": 0.0}
