"""`hvdtrain bench --output`: the file, and what is refused before anything is measured."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hvdtrain.bench.figures import Figure, Findings, three_digits
from hvdtrain.bench.measurement import Comparison
from hvdtrain.cli import bench_costs
from hvdtrain.cli.bench import bench

BARS = (Figure("hvdtrain.Trainer", (3.0, 1.0, 2.0)), Figure("costs $5 & <more>", (1.5, 1.5, 1.5)))
CURVES = tuple(
    Figure(series, (seconds / 1024 * size,), name, size)
    for name in ("allreduce", "allgather")
    for series, seconds in (("Horovod", 2.0), ("MPI", 1.0))
    for size in (4, 1024, 2**20)
)


@pytest.mark.parametrize("figures", [BARS, CURVES], ids=["bars", "curves"])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_chart_has_all_figures(figures: Any, suffix: str, tmp_path: Path) -> None:
    found = Findings("mnist; 2 CPUs", "examples/s", figures, "hvdtrain bench peers", "bytes")
    path = tmp_path / f"chart{suffix}"
    found.write(path)
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    drawn = path.read_text()
    # matplotlib draws text as paths, and keeps it in comments.
    named = {one.series for one in figures} | {one.panel for one in figures} - {""}
    for name in {"examples/s", "mnist; 2 CPUs", *named}:
        assert (
            name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in drawn
            or name in drawn
        )


def measured(np: int, controller: str, passes: int) -> Iterator[Comparison]:
    for number in range(passes):
        yield Comparison(3.0 + number, 0.5)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_costs, "measure_startup", measured)
    monkeypatch.setattr(bench_costs, "choose_controller", lambda *_: "mpi")
    monkeypatch.setattr(bench_costs, "installed_controllers", lambda: None)


def test_json_has_every_pass_and_the_command(tmp_path: Path) -> None:
    path = tmp_path / "startup.json"
    done = CliRunner().invoke(bench, ["startup", "--passes", "2", "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert f"wrote {path}" in done.output
    found = json.loads(path.read_text())
    assert [(one["series"], one["values"]) for one in found["figures"]] == [
        ("horovodrun", [3.0, 4.0]),
        ("hvdtrain run", [0.5, 0.5]),
    ]
    assert found["unit"] == "seconds"
    assert found["command"] == "bench startup --num-proc 2 --controller auto --passes 2"
    assert "start-up of 2 workers over mpi" in found["title"] and "CPUs" in found["title"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("out.txt", "expected a name that ends with .json or .png or .svg"),
        ("absent/out.json", "does not exist or is not writable"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(name: str, said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(bench, ["startup", "-o", str(tmp_path / name)])
    assert done.exit_code == 2 and said in done.output
    assert "to repeat:" not in done.output


def test_a_chart_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    done = CliRunner().invoke(bench, ["startup", "-o", str(tmp_path / "chart.png")])
    assert "pip install matplotlib" in str(done.exception)
    assert "to repeat:" not in done.output


@pytest.mark.parametrize(
    ("value", "text"), [(18816.6, "18,817"), (117.4, "117"), (37.2, "37.2"), (7.04, "7.04"), (0.0123, "0.0123")]
)  # fmt: skip
def test_a_slow_rate_keeps_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text
