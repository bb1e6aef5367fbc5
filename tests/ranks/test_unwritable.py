"""What rank 0 cannot write is one clear error on every rank."""

import pytest
from launch import Results, on_ranks


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("unwritable")


def alike(results: Results, case: str) -> list[str]:
    first, second = results.of(case)
    assert first == second
    return first


@pytest.mark.slow
def test_saving(results: Results) -> None:
    said = alike(results, "case_saving")
    whole, in_parts = said[:4], said[4:]
    for under_a_file, over_a_folder, full, left in (whole, in_parts):
        for error in (under_a_file, over_a_folder, full):
            assert error.startswith("UsageError: save: /") and "cannot be written: " in error
        assert "file/model.keras cannot be written: [Errno" in under_a_file
        assert "in_the_way.keras cannot be written: [Errno 21] Is a directory" in over_a_folder
        assert "No space left on device" in full
        # Nothing half written stays.
        assert left == "left: ['file', 'good.keras', 'in_the_way.keras']"


def test_run_dir(results: Results) -> None:
    gone, warned, epochs, has_model, blocked = alike(results, "case_run_dir")
    assert (gone, warned) == ("no error", "")
    assert epochs == "2 3", "only the line that went with the folder is lost: it is made again"
    assert has_model == "True"
    assert blocked.startswith("UsageError: save: /") and "model.keras cannot be written" in blocked


def test_a_full_disk_for_a_log_ends_no_training(results: Results) -> None:
    for rank, found in enumerate(results.of("case_full_disk")):
        assert found["full"] == found["fine"]
        assert found["fine warned"] == []
        assert len(found["full warned"]) == (rank == 0)
        for text in found["full warned"]:
            assert "callback CSVLogger failed; it will not be called again" in text
            assert "No space left" in text


def test_an_error_of_a_kind_not_foreseen(results: Results) -> None:
    first, second = results.of("case_error_of_a_kind_not_foreseen")
    assert first == "MemoryError: no room"
    assert second.startswith("EngineError: Rank 0 failed: ") and "no room" in second


@pytest.mark.slow
def test_callbacks(results: Results) -> None:
    said = alike(results, "case_callbacks")
    names = ["ModelCheckpoint", "CSVLogger", "BackupAndRestore", "TensorBoard"]
    in_parts = said.pop(4)
    assert in_parts.startswith("UsageError: save: /") and "file/model.keras cannot" in in_parts
    for name, error in zip(names * 2, said, strict=True):
        assert f"callback {name}: " in error
        place = {"CSVLogger": "missing"}.get(name, "file")
        assert f"/{place}" in error
