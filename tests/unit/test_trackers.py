"""Trackers get what metrics.csv gets, a resumed run is one run, and a tracker that fails ends and delays nothing."""

from __future__ import annotations

import csv
import json
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

import keras

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.trackers import MLflow, RunFacts, TensorBoard, WandB, tracker, tracking
from hvdtrain.trackers.tracking import Tracking

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype("float32")
Y = RNG.normal(size=(24, 1)).astype("float32")
STEPS = 3
"""Of an epoch."""
SPEED = {"seconds": 1.0, "examples_per_second": 8.0, "learning_rate": None}
PATIENCE_SECONDS = 60.0
"""For packages to be imported on a machine that runs other tests."""


class Kept:
    """Keeps what it is told, after failing `failures` times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.ids: list[str | None] = []
        self.config: Mapping[str, Any] = {}
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.status = ""

    def start(self, run: RunFacts) -> str:
        self._fail()
        self.ids.append(run.id)
        self.config = run.config
        return "run 7"

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._fail()
        self.rows.append((step, dict(values)))

    def end(self, status: str) -> None:
        self._fail()
        self.status = status

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("refused")

    @property
    def epochs(self) -> list[tuple[int, dict[str, float]]]:
        return [row for row in self.rows if "epoch" in row[1]]


def fit(
    trackers: Any, run_dir: Path | None = None, epochs: int = 2, **arguments: Any
) -> hvdtrain.Trainer:
    hvdtrain.init()
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((3,)), keras.layers.Dense(1, name="dense")]
    model = keras.Sequential(layers, name="small")
    trainer = hvdtrain.Trainer(
        *(model, "adam", "mse", ["mae"]),
        global_batch_size=8,
        run_dir=run_dir,
        trackers=trackers,
        **arguments,
    )
    trainer.fit(X, Y, epochs=epochs, validation_data=(X, Y), verbose=0)
    return trainer


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of an MLflow without a server; its client alone can write files only, and asks whether it may."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(tracking, "END_SECONDS", PATIENCE_SECONDS)
    return f"file:{tmp_path}/mlruns"


def metrics(run_dir: Path) -> list[dict[str, float]]:
    with (run_dir / "metrics.csv").open() as file:
        return [{name: float(v) for name, v in row.items()} for row in csv.DictReader(file)]


def test_every_tracker_gets_the_lines_of_metrics_csv(tmp_path: Path, uri: str) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir, kept = tmp_path / "digits", Kept()
    fit([kept, TensorBoard(), MLflow("small", uri)], run_dir)
    lines = metrics(run_dir)
    assert [step for step, _ in kept.epochs] == [STEPS, 2 * STEPS]
    board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    ids = json.loads((run_dir / "trackers.json").read_text())
    client = MlflowClient(uri)
    for name in ("loss", "mae", "val_loss", "val_mae", "epoch"):
        wanted = [line[name] for line in lines]
        assert [row[name] for _, row in kept.epochs] == wanted
        scalars = [(one.step, one.value) for one in board.Scalars(name)]
        assert scalars == [(STEPS * n, pytest.approx(v)) for n, v in enumerate(wanted, 1)]
        history = client.get_metric_history(ids["MLflow"], name)
        assert [(one.step, one.value) for one in history] == [
            (STEPS * n, v) for n, v in enumerate(wanted, 1)
        ]
    assert kept.epochs[0][1]["learning_rate"] == pytest.approx(1e-3)
    assert kept.epochs[0][1]["examples_per_second"] == pytest.approx(
        lines[0]["examples_per_second"], abs=0.1
    )
    # On a slow machine there are others before, as one comes every so many seconds.
    within = {step: row["step/loss"] for step, row in kept.rows if "step/loss" in row}
    assert within[STEPS] == pytest.approx(lines[0]["loss"])

    run = client.get_run(ids["MLflow"])
    config = json.loads((run_dir / "config.json").read_text())
    assert json.loads(json.dumps(kept.config, default=str)) == config
    assert run.data.params["optimizer.config.beta_1"] == str(
        config["optimizer"]["config"]["beta_1"]
    )
    assert (run.info.run_name, run.info.status) == ("digits", "FINISHED")
    assert run.data.tags["hvdtrain"] == hvdtrain.__version__
    assert kept.status == "finished"
    text = board.Tensors("config")[0].tensor_proto.string_val[0]
    assert b'"global_batch_size": 8' in text


def test_a_resumed_run_goes_on_in_the_same_run(tmp_path: Path, uri: str) -> None:
    from mlflow import MlflowClient

    run_dir, first, second = tmp_path / "digits", Kept(), Kept()
    checkpoints = {"checkpoints": hvdtrain.Checkpoints()}
    fit([first, MLflow(None, uri)], run_dir, epochs=1, **checkpoints)
    fit([second, MLflow(None, uri)], run_dir, epochs=2, **checkpoints)
    assert (first.ids, second.ids) == ([None], ["run 7"])
    assert [step for step, _ in second.epochs] == [2 * STEPS]
    client = MlflowClient(uri)
    (run,) = client.search_runs(["0"])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [
        (STEPS * n, line["loss"]) for n, line in enumerate(metrics(run_dir), 1)
    ]
    assert (run.data.params["epochs"], run.info.status) == ("1", "FINISHED")
    tracker = MLflow(None, uri)
    for name in ("a", "b"):
        fit(tracker, tmp_path / name, epochs=1)
    assert len(client.search_runs(["0"])) == 3, "another run_dir is another run"


def records(path: Path) -> Iterator[Any]:
    """What an offline run of wandb has written: LevelDB's log format, after a header of as many bytes as a chunk's."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15  # In the block.
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return  # It is being written.
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # All of a record, or its last part.
            yield Record.FromString(record)
            record = b""


def test_wandb_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Its service would stay, a child of this process for which other tests wait.
    request.addfinalizer(pytest.importorskip("wandb").teardown)
    monkeypatch.setattr(tracking, "END_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "hunter2"])
    run_dir, checkpoints = tmp_path / "digits", hvdtrain.Checkpoints()
    for epochs in (1, 2):
        tracker = WandB(project="small", mode="offline")
        fit(tracker, run_dir, epochs, checkpoints=checkpoints)
    files = sorted(run_dir.glob("wandb/offline-*/*.wandb"))
    name = json.loads((run_dir / "trackers.json").read_text())["WandB"]
    assert [path.name for path in files] == [f"run-{name}.wandb"] * 2
    until = time.monotonic() + PATIENCE_SECONDS
    # wandb's service may write the last records after it has confirmed the end.
    while not all(any(one.HasField("exit") for one in records(path)) for path in files):
        assert time.monotonic() < until
        time.sleep(0.1)
    written = [list(records(path)) for path in files]
    history = [
        {item.nested_key[0] or item.key: json.loads(item.value_json) for item in one.history.item}
        for one in [*written[0], *written[1]]
        if one.HasField("history")
    ]
    epochs = [row for row in history if "epoch" in row]
    assert [row["step"] for row in epochs] == [STEPS, 2 * STEPS]
    for column in ("loss", "mae", "val_loss", "val_mae"):
        assert [row[column] for row in epochs] == [line[column] for line in metrics(run_dir)]
    (run,) = [one.run for one in written[0] if one.HasField("run")]
    assert (run.project, run.display_name) == ("small", "digits")
    config = {
        item.key: item.value_json
        for one in written[0]
        if one.HasField("config")
        for item in one.config.update
    }
    assert config["global_batch_size"] == "8"
    assert [one.exit.exit_code for one in written[0] if one.HasField("exit")] == [0]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_without_a_run_dir_two_fits_are_one_run() -> None:
    kept = Kept()
    trainer = fit(kept, epochs=1)
    trainer.fit(X, Y, epochs=1, verbose=0)
    assert kept.ids == [None, "run 7"]
    assert [step for step, _ in kept.epochs] == [STEPS, 2 * STEPS]


def test_a_tracker_that_fails_is_warned_of_once_and_gets_everything_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "RETRY_SECONDS", 0.01)
    kept = Kept(failures=3)
    with pytest.warns(
        UserWarning, match="Kept: ConnectionError: refused. It may lack some values"
    ) as shown:
        fit(kept)
    assert len([one for one in shown if "Kept" in str(one.message)]) == 1
    assert [step for step, _ in kept.epochs] == [STEPS, 2 * STEPS]
    assert kept.status == "finished"


class Silent(Kept):
    """A server that never answers."""

    def start(self, run: RunFacts) -> str:
        Event().wait()
        raise AssertionError


def test_a_server_that_does_not_answer_costs_seconds_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "END_SECONDS", 0.5)
    silent, kept, began = Silent(), Kept(), time.monotonic()
    feeds = Tracking([silent, kept], None)
    feeds.begin({}, "node1", 0)
    feeds.note("epoch", {"epoch": 1, "values": {"loss": np.float32(1)}, **SPEED})
    assert time.monotonic() - began < 0.25
    with pytest.warns(UserWarning, match="Silent: no answer within") as shown:
        feeds.note("end", {"how": "finished"})
    assert len(shown) == 1
    assert 0.5 <= time.monotonic() - began < 2
    assert kept.status == "finished", "the others are not kept waiting"


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("finished", "finished"),
        ("UsageError: no data", "failed"),
        ("RuntimeError", "failed"),
        ("KeyboardInterrupt", "interrupted"),
        ("Preempted: this job was asked to stop", "interrupted"),
    ],
)
def test_status(how: str, status: str) -> None:
    kept = Kept()
    feeds = Tracking(kept, None)
    feeds.begin({}, "node1", 5)
    feeds.note("steps", {"steps": 2, "examples": 16, "values": {"loss": np.nan}, **SPEED})
    feeds.note("checkpoint", {"steps": 7})
    feeds.note("end", {"how": how})
    ((step, values),) = kept.rows
    assert (step, values["step/examples_per_second"]) == (7, 16.0)
    assert np.isnan(values["step/loss"])
    assert kept.status == status


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        ("mlfow", r"trackers='mlfow': choose from .* Did you mean 'mlflow'\?"),
        ([Kept(), Kept()], "pass at most one of each class"),
        ([None], "trackers=None: pass names, or objects with the methods"),
        (Kept, "trackers=<class .*Kept'>: pass names, or objects"),
    ],
)
def test_wrong_trackers(trackers: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Tracking(trackers, None)


@pytest.mark.parametrize("make", [MLflow, TensorBoard, WandB])
def test_a_missing_package_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"{make.__name__} .*pip install 'hvdtrain\[\w+\]'"):
        make()


def test_a_password_is_not_taken_in_a_uri() -> None:
    with pytest.raises(UsageError, match="MLFLOW_TRACKING_PASSWORD") as error:
        MLflow(tracking_uri="https://me:hunter2@mlflow.example.org")
    assert "hunter2" not in str(error.value)
