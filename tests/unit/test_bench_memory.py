"""The table of `hvdtrain bench memory`: theory, and what is made of a rank's report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvdtrain.bench import memory
from hvdtrain.bench.memory import CASES, Case, Theory, measure_peaks, row, theory
from hvdtrain.errors import EngineError


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("data-1", Theory(4, 4, 8)),
        ("data-2", Theory(4, 4, 8)),
        ("zero-2", Theory(4, 4, 4)),
        ("zero-4", Theory(4, 4, 2)),
        ("tensor-2", Theory(2, 2, 4)),
        ("tensor-4", Theory(1, 1, 2)),
        ("pipeline-2", Theory(2, 2, 4)),
    ],
)
def test_theory(case: str, wanted: Theory) -> None:
    assert theory(CASES[case], 1) == wanted


def test_the_rank_with_the_most_counts() -> None:
    cells = row(Case("zero", 2), 1_000_000, [15_000_000, 18_000_000])
    assert cells == ("zero", "2", "4", "4", "4", "12", "18", "1.50")


def test_report_of_rank_0() -> None:
    asked: list[tuple[int, Path, dict[str, object]]] = []

    def launch(np: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
        """A program that writes a report where the measurement says."""
        options, file = arguments
        asked.append((np, script, json.loads(options)))
        code = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        return [sys.executable, "-c", code, file, json.dumps({"peak_of_ranks": [5, 7]})]

    assert measure_peaks(Case("zero", 2), launch, 64, 4) == [5, 7]
    ((np, script, options),) = asked
    assert np == 2 and script == Path(memory.__file__)
    assert options == {"way": "zero", "ranks": 2, "width": 64, "blocks": 4}


def test_a_failure_says_what_the_ranks_said() -> None:
    def launch(np: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-c", "print('no memory'); raise SystemExit(3)"]

    with pytest.raises(EngineError, match=r"exit code 3(.|\n)*no memory"):
        measure_peaks(Case("data", 1), launch, 64, 4)
