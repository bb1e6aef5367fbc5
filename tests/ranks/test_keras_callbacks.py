"""model.fit with hvdtrain.keras: equal replicas, and clear errors where they are not."""

from typing import Any

import pytest
from launch import MPI_OR_GLOO_IN_ALL, Results, on_ranks


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("keras_callbacks", np=2, controller="mpi")


@pytest.mark.slow
@pytest.mark.parametrize("controller", MPI_OR_GLOO_IN_ALL)
def test_horovods_documented_example(controller: str) -> None:
    results = on_ranks("keras_callbacks", controller=controller)
    root, other = results.of("case_documented_example")
    printed = results.ran("case_documented_example").printed
    assert root["bits"] == other["bits"]
    assert root["files"] == [f"checkpoint-{epoch}.keras" for epoch in (1, 2, 3, 4)]
    assert other["files"] == []
    assert root["history"] == other["history"]
    assert root["history"]["loss"][-1] < root["history"]["loss"][0]
    assert root["history"]["lr"] == pytest.approx([0.015, 0.02, 0.02, 0.02])
    assert "finished gradual learning rate warmup to 0.02" in printed
    assert printed.count("Epoch 1/4") == 1


@pytest.mark.slow
def test_the_first_step_is_that_of_one_process(results: Results) -> None:
    assert max(results.of("case_first_step_equals_one_process")) < 1e-6


def test_validation_on_the_first_rank_alone(results: Results) -> None:
    root, other = results.of("case_validation_on_the_first_rank")
    assert root == ["loss", "val_loss"]
    assert other == ["loss"]


def test_another_root(results: Results) -> None:
    assert results.of("case_root_rank_1") == [[0.0], [0.0]]


def test_the_guard_stops_a_run_whose_reduction_was_removed(results: Results) -> None:
    for found in results.of("case_guard_without_reduction"):
        assert "drifted apart after the first step" in found["message"]
        assert "kernel' of rank 1 differs from that of rank 0" in found["message"]
        assert found["batches"] <= 1


@pytest.mark.slow
def test_weights_that_were_never_broadcast(results: Results) -> None:
    for found in results.of("case_never_broadcast"):
        assert "drifted apart after epoch 1" in found["forgotten"]
        assert found["before"] == found["late"] == "no error"


def test_statistics_that_were_broadcast_are_used(results: Results) -> None:
    first, other = results.of("case_adapted_statistics_were_broadcast")
    assert first == other


def test_the_guard_can_be_turned_off(results: Results) -> None:
    assert results.of("case_guard_turned_off") == ["no error"] * 2


def test_a_drift_in_the_middle_is_found_at_the_end_of_the_epoch(results: Results) -> None:
    for message in results.of("case_drift_in_the_middle"):
        assert "drifted apart after epoch 1" in message
        assert "bias' of rank 1" in message


def test_other_vocabulary(results: Results) -> None:
    for found in results.of("case_other_vocabulary"):
        for name in ("guarded", "alone"):
            assert 'vocabulary 0 (string_lookup) is "2 values' in found[name]
        assert (
            "vocabulary 0 (string_lookup) of rank 1 differs from that of rank 0" in found["checked"]
        )


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("case_other_number_of_steps", ["steps in an epoch is 4 on rank 0 and 5 on rank 1"]),
        (
            "case_other_input_shape",
            ["variable 0 (kernel)", "[8, 6]", "on rank 0", "[7, 6]", "on rank 1"],
        ),
        ("case_other_accumulation", ["gradient_accumulation_steps", "[2] on rank 1"]),
        ("case_loaded_on_one_rank", ["average_aggregated_gradients is [true] on rank 0"]),
        ("case_missing_metric", ["metric 'accuracy'", "missing on rank 1", "epoch 1"]),
        ("case_one_rank_stops_early", ["rank 0 begins epoch 2, rank 1 stops training"]),
        ("case_frozen_layer_that_differs", ["bias' of rank 1", "after epoch 1"]),
    ],
)
def test_a_disagreement_is_an_error_on_all_ranks(
    results: Results, case: str, parts: list[str]
) -> None:
    for message in results.of(case):
        assert [part for part in parts if part not in message] == []


def test_metrics_are_averaged_in_place(results: Results) -> None:
    assert results.of("case_metric_average") == [[0.5, 1.5, "nan"]] * 2


def test_each_rank_has_its_own_dropout_masks(results: Results) -> None:
    root, other = results.of("case_seeds")
    assert root["unchanged"] and not other["unchanged"]
    assert root["mask"] != other["mask"]


def test_moving_statistics_are_averaged(results: Results) -> None:
    root, other = results.of("case_statistics_are_averaged")
    assert root["bits"] == other["bits"]
    assert root["gap"] < 1e-5


@pytest.mark.slow
def test_no_false_alarms(results: Results) -> None:
    for found in results.of("case_no_false_alarms"):
        kept: Any = found.pop("it kept its value")
        assert kept == "True"
        assert set(found.values()) == {"no error"}, found


def test_the_best_model_is_written_once(results: Results) -> None:
    assert results.of("case_best_model_checkpoint") == [[".keras"], []]
