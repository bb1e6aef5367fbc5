"""`hvdtrain report`: what is read from runs of every kind, and the page that is drawn."""

from __future__ import annotations

import json
import os
import threading
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hvdtrain.cli.report import report
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.report.charts import MOST_POINTS, STEPS, metric_chart, over_time, seconds_of_ranks
from hvdtrain.report.page import duration, page
from hvdtrain.report.run_record import RunRecord, read_run


class Run:
    """Writes the events of a run, a second apart."""

    def __init__(self, folder: Path, workers: int = 2, steps_per_epoch: int = 10) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.clock = 1_000.0
        self.workers = workers
        self.steps_per_epoch = steps_per_epoch

    def note(self, event: str, **facts: Any) -> Run:
        self.clock += 1
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "time": self.clock, **facts}) + "\n")
        return self

    def begin(self, epoch: int = 1, step: int = 1, epochs: int = 3) -> Run:
        return self.note("begin", workers=self.workers, epochs=epochs, epoch=epoch, step=step)

    def steps(self, epoch: int, *steps: int, loss: float = 0.5) -> Run:
        for step in steps:
            facts = {"steps": 5, "examples": 320, "seconds": 1.0, "slowest": 0.3}
            values = {"loss": loss, "accuracy": None}
            self.note("steps", epoch=epoch, step=step, learning_rate=0.1, values=values, **facts)
        return self

    def epoch(self, number: int, **values: float) -> Run:
        self.steps(number, 5, 10)
        self.note("epoch", epoch=number, values=values)
        ranks = [1.0 + rank for rank in range(self.workers)]
        phases = dict.fromkeys(("steps", "input", "callbacks", "saving", "seconds"), ranks)
        return self.note("ranks", epoch=number, **phases) if self.workers > 1 else self

    def read(self, now: float | None = None) -> RunRecord:
        return read_run(self.folder, self.clock + 5 if now is None else now)


def test_a_finished_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run-1").begin(epochs=2)
    run.epoch(1, loss=0.5, val_loss=0.6).epoch(2, loss=0.25, val_loss=0.4)
    found = run.note("checkpoint", steps=20).note("end", how="finished").read()
    assert (found.name, found.state, found.workers, found.checkpoints) == (
        "run-1",
        "finished",
        2,
        1,
    )
    assert [(one.number, one.step, one.values["loss"]) for one in found.epochs] == [
        (1, 10, 0.5),
        (2, 20, 0.25),
    ]
    assert [window.step for window in found.windows] == [5, 10, 15, 20]
    assert [window.seconds for window in found.windows] == [1, 2, 5, 6]
    assert {window.examples_per_second for window in found.windows} == {320}
    assert found.metrics() == ["loss"]
    assert seconds_of_ranks(found)[1] == {"input": 4, "callbacks": 4, "saving": 4}


def test_a_killed_run_that_was_resumed_counts_what_it_trained_last(tmp_path: Path) -> None:
    run = Run(tmp_path).begin().epoch(1, loss=0.5).steps(2, 5, 10, loss=9.0)
    assert run.read().state == "running"
    assert run.read(now=run.clock + 61).state == "ended without notice (killed?)"
    run.clock += 3_600  # Nobody trained.
    run.workers = 3
    run.begin(epoch=2, step=6).steps(2, 10, loss=0.4).note("epoch", epoch=2, values={"loss": 0.3})
    found = run.note("end", how="finished").read()
    assert [(w.step, w.values["loss"]) for w in found.windows] == [
        (5, 0.5),
        (10, 0.5),
        (15, 9.0),
        (20, 0.4),
    ]
    assert found.seconds == 8, "without the hour between"
    assert found.workers == 3
    resumed, end = found.occurrences
    assert (resumed.what, resumed.text) == (
        "resumed",
        "in epoch 2, at step 6 of it, with 3 workers",
    )
    assert (end.what, end.step) == ("end", 20)


def test_two_fits_of_one_trainer_are_one_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for first, second in ((0.5, 0.4), (0.3, 0.2)):
        run.begin(epochs=2).epoch(1, loss=first).epoch(2, loss=second)
        run.note("end", how="finished")
    found = run.read()
    assert [(one.number, one.step, one.values["loss"]) for one in found.epochs] == [
        (1, 10, 0.5),
        (2, 20, 0.4),
        (3, 30, 0.3),
        (4, 40, 0.2),
    ]
    assert [window.step for window in found.windows] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert all(epoch.ranks for epoch in found.epochs)
    assert (found.epochs_planned, found.done) == (4, 1.0)
    assert [(one.what, one.step) for one in found.occurrences] == [
        ("end", 20),
        ("another fit", 20),
        ("end", 40),
    ]
    assert "<td>4 of 4</td>" in page([found])


def test_a_fit_from_a_later_epoch_on_is_told_as_whole(tmp_path: Path) -> None:
    run = Run(tmp_path).begin(epoch=4, epochs=6)
    for number in (4, 5, 6):
        run.epoch(number, loss=0.5)
    assert "<td>6 of 6</td>" in page([run.read()])


def test_a_restart_on_a_host_whose_clock_is_behind(tmp_path: Path) -> None:
    run = Run(tmp_path).begin().epoch(1, loss=0.5)
    for epoch in (2, 3):
        run.clock -= 3_600
        run.begin(epoch=epoch).epoch(epoch, loss=0.4)
    assert [one.seconds for one in run.read().epochs] == [3, 7, 11]
    assert run.read().state == "running"


def test_a_run_without_a_checkpoint_starts_again_from_nothing(tmp_path: Path) -> None:
    found = Run(tmp_path).begin().epoch(1, loss=5.0).begin().epoch(1, loss=0.5).read()
    assert [(epoch.step, epoch.values["loss"]) for epoch in found.epochs] == [(10, 0.5)]
    assert [window.step for window in found.windows] == [5, 10]
    assert [one.what for one in found.occurrences] == ["started again"]


def test_what_failed_and_what_was_warned_of(tmp_path: Path) -> None:
    run = Run(tmp_path).begin().steps(1, 5)
    found = run.note("warning", text="slow").note("end", how="EngineError: rank 1 failed").read()
    assert found.state == "EngineError: rank 1 failed"
    assert [(one.what, one.text, one.step) for one in found.occurrences] == [
        ("warning", "slow", 5),
        ("end", "EngineError: rank 1 failed", 5),
    ]


@pytest.mark.parametrize(
    "damage",
    [
        '{"event": "steps", "ti',
        "[1, 2]",
        "null",
        '{"event": "steps"}',
        '{"event": "steps", "time": "now"}',
        '{"event": "steps", "time": 1}',
        '{"event": "epoch", "time": 1, "epoch": "x", "values": {}}',
        '{"event": "epoch", "time": 1, "epoch": 1, "values": 3}',
        '{"event": "ranks", "time": 1, "epoch": 7}',
        '{"event": "begin", "time": 1, "workers": null}',
        '{"event": "begin", "time": 1, "workers": 2, "epoch": 2, "step": 1}',
        '{"event": ["steps"], "time": 1}',
        "\x00\xff",
        pytest.param("[" * 100_000, id="deep"),
        '{"event": "warning", "time": Infinity, "text": ""}',
        '{"event": "warning", "time": NaN, "text": ""}',
        '{"event": "warning", "time": 1e300, "text": ""}',
        pytest.param(f'{{"event": "warning", "time": 1{"0" * 400}, "text": ""}}', id="long"),
        '{"event": "steps", "time": 1, "epoch": 1e400, "step": 1, "examples": 1, "seconds": 1, "values": {}}',
    ],
)
def test_damaged_lines_are_left_out(tmp_path: Path, damage: str) -> None:
    run = Run(tmp_path).begin().steps(1, 5)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(damage + "\n")
    found = run.epoch(1, loss=0.5).note("end", how="finished").read()
    assert [epoch.values for epoch in found.epochs] == [{"loss": 0.5}]
    assert [window.step for window in found.windows] == [5, 5, 10]
    assert [one.what for one in found.occurrences] == ["end"]
    page([found])


def test_times_of_only_some_ranks_are_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path).begin().epoch(1, loss=0.5)
    run.note("ranks", epoch=1, input=[1.0], callbacks=[1.0, 2.0], saving=[1.0, 2.0], seconds=[3, 3])
    found = run.note("ranks", epoch=1, seconds=[3, 3]).read()
    assert found.slowest is not None and seconds_of_ranks(found)[1]["input"] == 2


def test_settings_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path).begin()
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000)
    assert run.read().config == {}


class Elements(HTMLParser):
    """The elements of a page; fails on one that is closed without being open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = "<script>alert('$x$')</script>&\"loss"


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    one = Run(tmp_path / "one").begin().epoch(1, **{HOSTILE: 0.5, "val_loss": 0.5, "loss": 1.0})
    other = Run(tmp_path / "other", workers=1).begin().epoch(1, loss=0.25)
    one.note("warning", text=HOSTILE)
    for run, rate in ((one, 0.1), (other, 0.2)):
        config = {"learning_rate": rate, "seed": 0, HOSTILE: HOSTILE}
        (run.folder / "config.json").write_text(json.dumps(config))
    text = page([one.read(), other.read()])
    elements = Elements(text)
    assert elements.text.count("<script>alert") > 3, "shown as text"
    names = {name for name, _ in elements.found}
    assert not names & {"script", "img", "iframe", "object"}
    for _, attributes in elements.found:
        for key in ("href", "xlink:href", "src"):
            assert (attributes.get(key) or "#").startswith(("#", "data:,"))
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    used = {
        (attributes.get(key) or "")[1:]
        for name, attributes in elements.found
        for key in ("href", "xlink:href")
        if name == "use"
    }
    assert used - {""} <= set(ids)
    differing = [a for name, a in elements.found if name == "tr" and a.get("class") == "differs"]
    assert len(differing) == 1, "the learning rate"


def test_a_chart_draws_every_run_and_says_what_it_shows(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name).begin().epoch(1, loss=0.5, val_loss=0.6).read() for name in "ab"]
    chart = metric_chart(runs, "loss", STEPS)
    assert chart.text == (
        "a: training 0.5 to 0.5, validation 0.6 to 0.6; b: training 0.5 to 0.5, validation 0.6 to 0.6"
    )
    shown = "".join(ET.fromstring(chart.svg).itertext())
    for words in ("a, training", "b, validation", "step"):
        assert words in shown


def test_a_run_that_becomes_nan_shows_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "a").begin().epoch(1, loss=0.5, val_loss=0.6)
    for number in (2, 3):
        run.steps(number, 5, 10, loss=None)  # type: ignore[arg-type]
        run.note("epoch", epoch=number, values={"loss": None, "val_loss": None})
    found = run.read()
    assert [str(epoch.values["loss"]) for epoch in found.epochs] == ["0.5", "nan", "nan"]
    chart = metric_chart([found], "loss", STEPS)
    assert chart.text == "a: training 0.5 to nan, validation 0.6 to nan"
    assert page([found]).count("<td>nan</td>") == 2 + 4, "in the summary, and in two epochs"


def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    run = Run(tmp_path, steps_per_epoch=1_000).begin(epochs=100)
    with (tmp_path / "events.jsonl").open("a") as file:
        for second in range(10_000):  # 100,000 steps.
            epoch, step = second // 100 + 1, second % 100 * 10 + 10
            values = {"loss": 1 / (second + 1), "accuracy": second / 10_000, "f1": second % 7}
            facts = {"steps": 10, "examples": 640, "seconds": 1, "slowest": 0.2}
            place = {"epoch": epoch, "step": step, "learning_rate": 0.1}
            line = {"event": "steps", "time": 1001 + second, "values": values} | facts | place
            file.write(json.dumps(line) + "\n")
    found = run.read()
    assert found.steps == 100_000
    assert over_time([found]).label == "training time (h)"
    assert len(page([found])) < 500_000
    chart = metric_chart([found], "loss", STEPS)
    # A line has a point for each L in its path.
    assert chart.svg.count("L ") < 2 * MOST_POINTS + 100


def test_names_of_every_kind(tmp_path: Path) -> None:
    """A folder whose name is no UTF-8, a metric with half a surrogate pair, and a run that matplotlib would hide."""
    folders = [tmp_path / os.fsdecode(name) for name in (b"run-\xff", b"_a")]
    for folder in folders:
        Run(folder).begin().epoch(1, **{"loss": 0.5, "f\ud800": 0.25})
    output = tmp_path / "page.html"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for runs in (folders, folders[:1]):
            words = [*map(os.fspath, runs), "-o", str(output)]
            done = CliRunner().invoke(report, words, catch_exceptions=False)
            assert done.output == f"{output}\n"
            text = output.read_text("utf-8")
            assert "run-\ufffd" in text and "f?" in text
            if len(runs) > 1:
                assert "_a, training" in text
        done = CliRunner().invoke(report, [os.fspath(folders[0])], catch_exceptions=False)
    assert done.output == f"{tmp_path}/run-\ufffd/report.html\n"


def test_the_command(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        Run(tmp_path / name / "run").begin().epoch(1, loss=0.5)
    run = str(tmp_path / "a" / "run")
    done = CliRunner().invoke(report, [run], catch_exceptions=False)
    assert done.output == f"{run}/report.html\n"
    output = str(tmp_path / "both.html")
    CliRunner().invoke(
        report, [run, str(tmp_path / "b" / "run"), "-o", output], catch_exceptions=False
    )
    assert f"{tmp_path}/b/run" in Path(output).read_text(), "runs of one name are told apart"
    for folder, words in ((tmp_path, "contains no run"), (tmp_path / "none", "no such folder")):
        with pytest.raises(UsageError, match=words):
            CliRunner().invoke(report, [str(folder)], catch_exceptions=False)
    with pytest.raises(HvdtrainError, match="cannot be written"):
        CliRunner().invoke(report, [run, "-o", "/proc/x/y.html"], catch_exceptions=False)


def test_links_and_devices_stay(tmp_path: Path) -> None:
    """As root, replacing /dev/null would remove it from the machine."""
    Run(tmp_path / "run").begin().epoch(1, loss=0.5)
    link, pipe = tmp_path / "latest.html", tmp_path / "pipe"
    link.symlink_to("page.html")
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    for path in (link, pipe):
        words = [str(tmp_path / "run"), "-o", str(path)]
        CliRunner().invoke(report, words, catch_exceptions=False)
    assert link.is_symlink() and (tmp_path / "page.html").read_text().startswith("<!doctype")
    reader.join(10)
    assert pipe.is_fifo() and read[0].startswith("<!doctype")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"),
        (12.34, "12.3 s"),
        (65, "1 min 5 s"),
        (3_599.9, "1 h 0 min"),
        (12_000, "3 h 20 min"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
