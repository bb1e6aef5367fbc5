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
    gone, blocked = alike(results, "case_run_dir")
    assert gone.startswith("UsageError: run_dir '/")
    assert "No such file or directory" in gone and "metrics.csv" in gone
    assert blocked.startswith("UsageError: save: /") and "model.keras cannot be written" in blocked


def test_callbacks(results: Results) -> None:
    said = alike(results, "case_callbacks")
    names = ["ModelCheckpoint", "CSVLogger", "BackupAndRestore", "TensorBoard"]
    in_parts = said.pop(4)
    assert in_parts.startswith("UsageError: save: /") and "file/model.keras cannot" in in_parts
    for name, error in zip(names * 2, said, strict=True):
        assert f"callback {name}: " in error
        place = {"CSVLogger": "missing"}.get(name, "file")
        assert f"/{place}" in error
