"""The live view: what it shows, how it fits, and that everything else on the terminal stays whole."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Any

import pytest
from glass import Glass
from terminal import Terminal

from hvdtrain.launch.running import live_rows
from hvdtrain.launch.running.live_rows import LiveRows
from hvdtrain.report.run_record import RunReader, RunRecord
from hvdtrain.view import own_terminal
from hvdtrain.view.channel import EventFilter, encoded
from hvdtrain.view.live_view import BARS, Line, Screen, is_drawable, render, sparkline
from hvdtrain.view.own_terminal import TerminalView
from hvdtrain.view.region import Region

BEGIN = {"workers": 2, "epochs": 4, "epoch": 1, "step": 1, "steps_per_epoch": 10}


def events(epochs: int = 2, **more: Any) -> list[dict[str, Any]]:
    """Of a run whose epochs take 10 s; the last of them has come to step 5."""
    found: list[dict[str, Any]] = [{"event": "begin", "time": 0.0, **BEGIN}]
    speed = {"steps": 5, "examples": 500, "seconds": 5.0, "memory": {"host": 2.5e9, "gpu": 1e9}}
    for epoch in range(1, epochs + 1):
        for step in (5, 10):
            clock = 10.0 * (epoch - 1) + step
            values = {"loss": 1 / clock, "accuracy": clock / 100}
            facts = {"epoch": epoch, "step": step, "values": values, **speed}
            found.append({"event": "steps", "time": clock, **facts})
            if epoch == epochs:
                break
        else:
            values |= {f"val_{name}": one for name, one in values.items()}
            found.append({"event": "epoch", "time": clock, "epoch": epoch, "values": values})
            ranks = {"input": [1.0, 3.0], "callbacks": [0.5, 0.0], "saving": [0.0, 0.0]}
            ranks |= {"seconds": [10.0, 10.0]}
            found.append({"event": "ranks", "time": clock, "epoch": epoch, **ranks})
    return [*found, *({"event": name, "time": 16.0, **facts} for name, facts in more.items())]


def run(*args: Any, **more: Any) -> RunRecord:
    reader = RunReader("run-1")
    for event in events(*args, **more):
        reader.take(event)
    return reader.record(now=16.0)


def texts(record: RunRecord, screen: Screen) -> list[str]:
    return [line.text for line in render(record, replace(screen, colour=False))]


def test_what_it_shows() -> None:
    first, facts, loss, accuracy, slowest = texts(run(), Screen(80, 24))
    assert first.startswith("Epoch 2/4 ━")
    assert first.endswith("─  37%  0:25 left"), "15 of 40 steps, the first 5 of which did not count"
    assert facts == "step 5/10  100 examples/s  2 workers  memory 2.5 GB  GPU memory 1.0 GB"
    assert loss.split() == ["loss", "0.06667", "█▃▁", "val", "0.1", "▁"]
    assert accuracy.split() == ["accuracy", "0.15", "▁▅█", "val", "0.1", "▁"]
    assert loss.index("val") == accuracy.index("val")
    assert slowest == "slowest: rank 1  1.5 s behind (15%)  waiting for data  in the last epoch"


def test_between_two_epochs_and_within_a_validation() -> None:
    facts = {"title": "Validation", "epoch": None, "step": 3, "steps": 4, "ended": False}
    facts |= {"examples_per_second": 1234.0, "values": {}}
    _, _, third, *_ = texts(run(**{"pass": facts}), Screen(80, 24))
    assert third == "Validation 3/4  1,234 examples/s"
    assert not any(
        "Val" in text for text in texts(run(**{"pass": facts | {"ended": True}}), Screen(80, 24))
    )


def test_an_evaluation_alone() -> None:
    reader = RunReader()
    facts = {"event": "pass", "time": 1.0, "title": "Evaluation", "epoch": None, "ended": False}
    reader.take({**facts, "step": 3, "steps": 4, "examples_per_second": 99.0, "values": {}})
    (line,) = texts(reader.record(), Screen(80, 24))
    assert line.startswith("Evaluation ━")
    assert line.endswith("─  75%  3/4  99 examples/s")
    reader.take({**facts, "step": 3, "steps": None, "examples_per_second": 99.0, "values": {}})
    assert texts(reader.record(), Screen(80, 24)) == ["Evaluation  3  99 examples/s"]


def test_a_value_that_is_nan_is_seen() -> None:
    values = {"loss": None, "accuracy": 0.5}
    steps = {"epoch": 2, "step": 6, "steps": 1, "examples": 1, "seconds": 1.0, "values": values}
    assert texts(run(steps=steps), Screen(80, 24))[2].split()[:2] == ["loss", "nan"]


@pytest.mark.parametrize("columns", [1, 10, 40, 75, 76, 80, 200])
@pytest.mark.parametrize("rows", [1, 3, 24])
@pytest.mark.parametrize("blocks", [True, False])
def test_it_fits(columns: int, rows: int, blocks: bool) -> None:
    lines = render(run(), Screen(columns, rows, blocks=blocks))
    assert 1 <= len(lines) <= max(1, rows - 1)
    for line in lines:
        (shown,) = Glass(columns).write(line.text).rows
        assert len(shown) == line.cells <= max(1, columns - 3), "room for ^C"
        assert blocks or shown.isascii()


def test_names_of_wide_characters_fit() -> None:
    values = {"損失" * 20: 1.0, "é" * 3: 2.0}
    steps = {"epoch": 2, "step": 6, "steps": 1, "examples": 1, "seconds": 1.0, "values": values}
    _, _, first, second, _ = render(run(steps=steps), Screen(40, 24, colour=False))
    assert first.cells <= 37
    assert second.text.startswith("ééé" + " " * 17)


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == BARS
    assert sparkline(range(800), 8) == BARS
    assert sparkline([2, 2, 2], 8) == "▁▁▁"
    assert sparkline([0, float("nan"), float("inf"), 1], 8) == "▁█"
    assert sparkline([1.0], 0) == sparkline([], 8) == ""


def test_terminals_that_cannot_be_drawn_on() -> None:
    assert is_drawable({"TERM": "xterm"})
    assert not is_drawable({"TERM": "dumb"})
    assert not is_drawable({})


# The rows at the end of the terminal


def lines(*words: str) -> list[Line]:
    return [Line(word, len(word)) for word in words]


def test_rows_are_drawn_in_place_of_those_before() -> None:
    region, glass = Region(), Glass()
    glass.write("above\n")
    glass.write(region.draw(lines("one", "two", "three"), 80))
    glass.write(region.draw(lines("1", "2"), 80))
    assert glass.rows == ["above", "1", "2"]
    glass.write(region.erase(80) + "more\n" + region.draw(lines("3"), 80))
    assert glass.rows == ["above", "more", "3"]
    assert region.erase(80) + region.erase(80) == "\r\x1b[J", "once"


def test_a_terminal_that_becomes_narrower_shows_a_row_as_several() -> None:
    region = Region()
    region.draw(lines("x" * 79, "y" * 20), 80)
    assert region.erase(40) == "\r\x1b[2A\x1b[J", "three rows"


# From rank 0 to `hvdtrain run`

EVENT = {"event": "pass", "time": 1.0, "title": "x\x1b\\\n<é"}


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_taken_out_however_they_arrive(size: int) -> None:
    data = f"a\x1b[31mb{encoded(EVENT)}{encoded(EVENT)}c\n\x1b_other\x1b\\".encode()
    found, kept, take = [], b"", EventFilter()
    for at in range(0, len(data), size):
        text, events = take.feed(data[at : at + size])
        kept += text
        found += events
    assert kept + take.rest() == b"a\x1b[31mbc\n\x1b_other\x1b\\"
    assert found == [EVENT, EVENT]


def test_what_is_no_event_is_output() -> None:
    take = EventFilter()
    for text in (b"\x1b_hvdtrain nothing\x1b\\", b"\x1b_hvdtrain []\x1b\\"):
        assert take.feed(text) == (text, [])
    assert take.feed(b"\x1b_hv") == (b"", [])
    assert take.rest() == b"\x1b_hv", "nothing more comes"
    take.feed(b'\x1b_hvdtrain {"ev')
    assert take.rest() == b"", "a rank that was killed"


class TestBelowTheOutputOfARun:
    @pytest.fixture
    def terminal(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Terminal:
        monkeypatch.setattr(live_rows, "screen_of", lambda *args: Screen(80, 24))
        monkeypatch.setattr(live_rows, "REDRAW_SECONDS", 0.0)
        one = Terminal(tmp_path, view=LiveRows(sys.__stdout__))
        output = one.output
        output._one_terminal = True
        output._screens["stderr"] = output._screens["stdout"]
        return one

    def feed(self, terminal: Terminal, stream: Any, text: str, rank: int = 0) -> list[str]:
        for line in text.splitlines(keepends=True):
            terminal.output.feed(stream, f"[1,{rank}]<{stream}>:{line}".encode())
        terminal.output.settle()
        return Glass().write(terminal.out.getvalue().decode()).rows

    def test_everything_else_stands_above(self, terminal: Terminal) -> None:
        with terminal.output as output:
            shown = self.feed(terminal, "stdout", "one\n" + "".join(map(encoded, events())))
            assert [row.split()[0] for row in shown] == [
                "one",
                "Epoch",
                "step",
                "loss",
                "accuracy",
                "slowest:",
            ]
            self.feed(terminal, "stdout", "two\n")
            self.feed(terminal, "stderr", "careful\n", rank=1)
            self.feed(terminal, "stdout", "half of ")
            shown = self.feed(terminal, "stdout", encoded(events()[-1]))
            assert shown == ["one", "two", "[1] careful", "half of "], "no view behind half a line"
            shown = self.feed(terminal, "stdout", "a line\n")
            assert shown[3:5][0] == "half of a line"
            assert shown[4].startswith("Epoch 2/4")
            output.say("SIGINT: stopping")
            output.finish()
        shown = Glass().write(terminal.out.getvalue().decode()).rows
        assert shown == ["one", "two", "[1] careful", "half of a line", "SIGINT: stopping", ""]
        assert terminal.logged("rank.0/stdout") == b"one\ntwo\nhalf of a line\n"

    def test_a_fit_that_has_ended_leaves_nothing(self, terminal: Terminal) -> None:
        with terminal.output:
            told = "".join(map(encoded, events(end={"how": "finished"})))
            assert self.feed(terminal, "stdout", f"one\n{told}") == ["one", ""]

    def test_a_flood_is_drawn_under_now_and_then(
        self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(live_rows, "REDRAW_SECONDS", 0.05)
        with terminal.output:
            self.feed(terminal, "stdout", "".join(map(encoded, events())) + "line\n" * 2000)
        assert terminal.out.getvalue().count(b"Epoch 2/4") < 200


# A process with a terminal of its own


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_process_alone_prints_above_its_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_terminal, "screen_of", lambda *args: Screen(80, 24))
    monkeypatch.setattr(own_terminal, "REDRAW_SECONDS", 0.0)
    out = Tty()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, out)
    with TerminalView() as view:
        for event in events():
            view.show(event)
        print("one")
        print("two", file=sys.stderr)
        print("a", "line", end="")
        view.show(events()[-1])
        assert Glass().write(out.getvalue()).rows == ["one", "two", "a line"]
        print()
        assert Glass().write(out.getvalue()).rows[3].startswith("Epoch 2/4")
    assert sys.stdout is sys.stderr is out
    print("after")
    assert Glass().write(out.getvalue()).rows == ["one", "two", "a line", "after", ""]
