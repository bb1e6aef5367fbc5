"""tests/ranks/results.py: values and arrays come back as they were, and distances are not smaller than they are."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "ranks"))
    import results

    return results


def test_what_is_written_is_read(results: ModuleType, tmp_path: Path) -> None:
    value = {"a": [1, None, "x", np.float32(0.5)], "b": {"c": np.arange(6).reshape(2, 3)}}
    results.write(tmp_path / "one.json", value)
    found = results.read(tmp_path / "one.json", tmp_path)
    assert found["a"] == [1, None, "x", 0.5]
    np.testing.assert_array_equal(found["b"]["c"], np.arange(6).reshape(2, 3))


def test_distances_come_in_place_of_what_is_compared(results: ModuleType, tmp_path: Path) -> None:
    results.write(tmp_path / "wanted.json", {"w": [np.zeros(2), np.full(2, 8.0)]})
    found = results.Apart([np.zeros(2), np.array([8.0, 4.0])], "wanted", "w", "relative")
    results.write(tmp_path / "one.json", {"weights": found})
    assert results.read(tmp_path / "one.json", tmp_path) == {"weights": 0.5}


@pytest.mark.parametrize(
    ("found", "wanted", "far"),
    [
        ([1.0, math.nan], [1.0, 2.0], math.nan),
        ({"a": [1.0], "b": math.nan}, {"a": [3.0], "b": 1.0}, math.nan),
        ([[1.0], [2.0, 5.0]], [[1.0], [2.0, 2.0]], 3.0),
    ],
)
def test_far(results: ModuleType, found: object, wanted: object, far: float) -> None:
    assert results.far(found, wanted) == pytest.approx(far, nan_ok=True)


@pytest.mark.parametrize(
    ("found", "wanted"), [([1.0], [1.0, 2.0]), ({"a": 1.0}, {"b": 1.0}), (np.ones(1), np.ones(2))]
)
def test_another_structure_is_an_error(results: ModuleType, found: object, wanted: object) -> None:
    with pytest.raises(AssertionError):
        results.far(found, wanted)


def test_nothing_compared_is_an_error(results: ModuleType) -> None:
    with pytest.raises(ValueError):
        results.far([], [])
