"""The figures of `hvdtrain bench scaling`, from turns made up by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.bench import scaling
from hvdtrain.bench.scaling import Pass, in_step, measure
from hvdtrain.bench.turns import Turn


def test_in_step_each_step_takes_the_slowest_process() -> None:
    assert in_step([Turn((1.0, 2.0), 10), Turn((3.0, 1.0), 10)]) == Turn((3.0, 2.0), examples=20)


def test_scaling_is_part_of_so_many_plain_processes() -> None:
    one = Pass(plain=100, apart=190, in_step=180, raw=175, ranks=171, size=2)
    assert one.scaling(one.ranks) == pytest.approx(0.855)


def test_a_pass_is_a_turn_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds of two steps: faster alone than with the other process.
    seconds = {
        "plain 0": (1.0, 1.0),
        "plain 1": (1.0, 4.0),
        "mpi 0": (2.5, 2.5),
        "keras 0": (4.0, 4.0),
    }
    taken: list[list[str]] = []

    def start(launch: Any, np: int, script: Path, options: Mapping[str, Any]) -> Any:
        assert np == (1 if options["way"] == "plain" else 2)
        assert Path(scaling.__file__) == script
        name = f"{options['way']} {options['core']}"
        return SimpleNamespace(name=name, examples=np * options["batch_size"])

    def take(*jobs: Any) -> list[Turn]:
        taken.append([job.name for job in jobs])
        return [Turn(seconds[job.name], job.examples) for job in jobs]

    @contextlib.contextmanager
    def turns() -> Iterator[Callable[..., Any]]:
        yield start

    monkeypatch.setattr(scaling, "in_turns", turns)
    monkeypatch.setattr(scaling, "take_turns", take)
    launch: Any = None
    first, _ = measure("mnist", 10, "keras", 2, 2, "mpi", launch)
    assert taken == 2 * [["plain 0"], ["plain 0", "plain 1"], ["mpi 0"], ["keras 0"]]
    assert first == Pass(plain=10, apart=14, in_step=8, raw=8, ranks=5, size=2)
