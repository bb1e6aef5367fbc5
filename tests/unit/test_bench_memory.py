"""The table of `hvdtrain bench memory`: theory, and what is made of a rank's report."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from hvdtrain.bench.memory import CASES, Case, Peak, Theory, measure_peak, row, theory
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
    cells = row(Case("zero", 2), Peak(1_000_000, (15_000_000, 18_000_000)))
    assert cells == ("zero", "2", "4", "4", "4", "12", "18", "1.50")


def reporting(report: dict[str, object]) -> list[str]:
    """A program that writes `report` where a measurement says."""
    code = (
        "import sys, pathlib; pathlib.Path(sys.argv[-1].removeprefix('--report=')).write_text({!r})"
    )
    return [sys.executable, "-c", code.format(json.dumps(report))]


def test_report_of_rank_0() -> None:
    asked: list[tuple[int, Path, tuple[str, ...]]] = []

    def launch(np: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
        asked.append((np, script, arguments))
        return reporting({"peak_of_ranks": [5, 7], "parameters": 3})

    assert measure_peak(Case("zero", 2), launch, 64, 4) == Peak(3, (5, 7))
    ((np, script, arguments),) = asked
    assert np == 2 and script.name == "memory_rank.py" and script.exists()
    assert shlex.join(arguments) == "zero --ranks=2 --width=64 --blocks=4"


def test_a_failure_says_what_the_ranks_said() -> None:
    with pytest.raises(EngineError, match=r"exit code 3(.|\n)*no memory"):
        measure_peak(
            Case("data", 1),
            lambda np, script, arguments: [
                *(sys.executable, "-c", "print('no memory'); raise SystemExit(3)")
            ],
            64,
            4,
        )
