"""What Horovod's own tests of its Keras module ask for, on two ranks; and what ordinary scripts need."""

import pytest
from launch import Results, on_ranks

SHORT = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "4", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8"}


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("horovod_keras", env={"SLEEP_SECONDS": "0.5"})


@pytest.mark.slow
def test_learning_rates_of_20_epochs(results: Results) -> None:
    root, other = results.of("case_learning_rates_of_20_epochs")
    assert root == other
    rates = root["rates"]
    assert sorted(rates[:5]) == rates[:5] and rates[4] == pytest.approx(0.2)
    # A number is the factor of each epoch.
    assert rates[5:10] == pytest.approx([0.2 * 0.1**epoch for epoch in range(5)])
    assert rates[10:15] == pytest.approx([0.2 * 0.01**epoch for epoch in range(5)])
    assert rates[15:] == pytest.approx([0.2 * epoch for epoch in range(15, 20)])


def test_aggregation(results: Results) -> None:
    for rank, found in enumerate(results.of("case_aggregation")):
        # Two updates in ten steps; mean of (rank + 1) is 1.5; a local gradient counts half.
        own = (rank + 1) / 2
        mean = [2.0, 1.0 - 2 * 1.5, 2.0, 2 * 0.5, 1.0 - 2 * own, 2.0]
        summed = [8.0, 1.0 - 8 * 1.5, 2.0, 8 * 0.5, 1.0 - 8 * own, 2.0]
        assert found == {"True": mean, "False": summed}


def test_an_infinite_gradient_is_forgotten(results: Results) -> None:
    assert results.of("case_an_infinite_gradient_is_forgotten") == [2.0, 2.0]


def test_sparse_as_dense(results: Results) -> None:
    assert results.of("case_sparse_as_dense") == [[3, 1]] * 2


def test_elastic_state(results: Results) -> None:
    kept = repr({10: (0, b"x")})
    states = [[1.0, 20, kept], [1.0, 20, kept], [0.0, 22, kept]]
    for found in results.of("case_elastic_state"):
        assert found == {"KerasState": states, "TensorFlowKerasState": states}


def test_elastic_state_while_gradients_wait(results: Results) -> None:
    for found in results.of("case_elastic_state_while_gradients_wait"):
        assert found == {"optimizer": [2.0 - (0.5 + 1.0) / 2], "tape": [2.0 - (0.5 + 1.0) / 2]}


def test_broadcast_with_local_variables(results: Results) -> None:
    for rank, found in enumerate(results.of("case_broadcast_with_local_variables")):
        assert found == {"local": [float(rank)], "shared": [1.0]}


def test_the_optimizer_of_a_process_set(results: Results) -> None:
    for rank, found in enumerate(results.of("case_optimizer_of_a_process_set")):
        assert found == {"1": [2.0 * (rank + 1)], "2": [2.0 * (rank + 1)], "tape": [rank + 1.0]}


def test_only_the_first_rank_writes(results: Results) -> None:
    for found in results.of("case_only_the_first_rank_writes"):
        checkpoints = [f"{epoch}.keras" for epoch in (1, 2, 3, 4)]
        assert found["files"] == [*checkpoints, "backup", "log-0.csv"]
        assert found["epochs"] == [2, 3]
        # float32 weights of .weights.h5 are exact: two epochs, then two, are four.
        assert found["gap"] == 0.0
        assert found["files of a plain model"] == 3


def test_nan_on_one_rank_stops_all(results: Results) -> None:
    """After the batch in which one rank sees it, as one process does: there are no further steps for the others."""
    assert results.of("case_nan_on_one_rank") == [{"steps": [0, 1], "epochs": [0]}] * 2


def test_several_optimizers(results: Results) -> None:
    for found in results.of("case_several_optimizers"):
        assert found["files"] == ["backup", "log-0.csv"]
        assert found["epochs"] == [[0], [1]]
        assert "differs" in found["message"]


def test_saved_while_gradients_wait(results: Results) -> None:
    """Equal to one process that was not interrupted: float32 sums in another order."""
    for found in results.of("case_saved_while_gradients_wait"):
        assert max(found.values()) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", ["case_a_slow_writer", "case_a_slow_writer_within_an_epoch"])
def test_a_writer_that_takes_longer_than_a_stall(case: str) -> None:
    found = on_ranks("horovod_keras", env=SHORT).of(case)
    assert found == [{"epochs": [0], "saved": True}] * 2


@pytest.mark.slow
def test_a_collective_on_one_rank(results: Results) -> None:
    """It would wait for the other rank, which waits for this one."""
    told = "a collective is called here, in which all workers must take part"
    for found in results.of("case_a_collective_on_one_rank"):
        hooks = [
            f"{hook}, given {to}"
            for hook in ("on_epoch_end", "on_train_batch_end")
            for to in ("to all", "to rank 0")
        ]
        assert sorted(found) == ["first_rank_first", *hooks]
        assert [message for message in found.values() if told not in message] == []


@pytest.mark.parametrize(
    "seconds", ["0.5", pytest.param("", marks=pytest.mark.slow, id="longer than a stall")]
)
def test_first_rank_first(results: Results, seconds: str) -> None:
    case = "case_first_rank_first"
    ran = results if seconds else on_ranks("horovod_keras", env=SHORT)
    root, other = ran.of(case)
    assert root == {"found": 0, "said": "OSError: no such host: data.example"}
    assert other["found"] == 1
    assert other["said"] == (
        "EngineError: Rank 0 failed while the other ranks waited for it: OSError: no such host: "
        "data.example"
    )
