"""The Trainer's pure parts, in one process."""

from __future__ import annotations

import csv
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from keras import callbacks as kc
from thread_ranks import run_ranks, thread_ranks

import hvdtrain
from hvdtrain.collectives import consistency
from hvdtrain.collectives.communicator import Communicator
from hvdtrain.collectives.metrics import check_additive, read_state, write_state
from hvdtrain.data import Share, make_source
from hvdtrain.errors import EngineError, ReplicaError, UsageError
from hvdtrain.runtime import Rank, engine_errors
from hvdtrain.strategies import Strategy
from hvdtrain.trainer.callback_ranks import TRAIN_METHODS, callbacks_of_rank, need_global_batches
from hvdtrain.trainer.learning_rate_scaling import Ramp, WarmUp, scale_learning_rate
from hvdtrain.trainer.progress import resolve_verbose
from hvdtrain.trainer.run_dir import EpochTable, RunDir
from hvdtrain.trainer.setup import (
    compile_arguments,
    make_model,
    split_arrays,
    symbolic_data,
)
from hvdtrain.trainer.shares import grouped


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> None:
    hvdtrain.init()


def small() -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])


# The learning rate.


@pytest.mark.parametrize(
    ("scaling", "workers", "rate"),
    [("none", 8, 0.1), ("linear", 8, 0.8), ("sqrt", 4, 0.2), ("linear", 1, 0.1)],
)
def test_scaling(scaling: str, workers: int, rate: float) -> None:
    optimizer = keras.optimizers.SGD(0.1)
    scale_learning_rate(optimizer, scaling, workers)
    assert float(optimizer.learning_rate) == pytest.approx(rate)


def test_warm_up_ends_at_the_rate_and_leaves_it_alone() -> None:
    model = small()
    model.compile(keras.optimizers.SGD(0.4))
    warm_up = WarmUp([Ramp(model.optimizer, 0.1, 0.4)], epochs=1.5, steps_per_epoch=2)
    warm_up.set_model(model)
    rates = []
    for step in range(6):
        if step % 2 == 0:
            warm_up.on_epoch_begin(step // 2)
        warm_up.on_train_batch_begin(step % 2)
        rates.append(float(model.optimizer.learning_rate))
        if step == 2:  # somebody else's change right afterwards stays
            model.optimizer.learning_rate = 0.05
    assert rates == pytest.approx([0.2, 0.3, 0.4, 0.05, 0.05, 0.05])


@pytest.mark.parametrize(
    ("epoch", "batches", "rates"),
    [
        # Three steps an execution: the last of the five rises is between two calls.
        (0, [0, 3, 6, 9], [0.2, 0.8, 1.0, 0.5]),
        # A run that goes on in the middle of the warm-up, and one that goes on after it.
        (0, [3, 4, 5], [0.8, 1.0, 0.5]),
        (1, [0, 1], [0.5, 0.5]),
    ],
)
def test_warm_up_follows_from_epoch_and_step(
    epoch: int, batches: list[int], rates: list[float]
) -> None:
    model = small()
    model.compile(keras.optimizers.SGD(0.5))
    warm_up = WarmUp([Ramp(model.optimizer, 0.0, 1.0)], epochs=0.5, steps_per_epoch=10)
    warm_up.set_model(model)
    warm_up.on_epoch_begin(epoch)
    found = []
    for batch in batches:
        warm_up.on_train_batch_begin(batch)
        found.append(float(model.optimizer.learning_rate))
        if found[-1] == 1.0:
            model.optimizer.learning_rate = 0.5
    assert found == pytest.approx(rates)


# Callbacks.


class OnEpochs(kc.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        pass


class OnBatches(kc.Callback):
    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


class LogsEachBatch(kc.CSVLogger):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    ("callback", "needs"),
    [
        (OnEpochs(), False),
        (OnBatches(), True),
        (kc.EarlyStopping(), False),
        (kc.TerminateOnNaN(), True),
        (kc.LambdaCallback(on_epoch_end=lambda epoch, logs: None), False),
        (kc.LambdaCallback(on_train_batch_begin=lambda batch, logs: None), True),
        (kc.ModelCheckpoint("m.keras"), False),
        (kc.ModelCheckpoint("m.keras", save_freq=5), True),
        (kc.TensorBoard("board"), False),
        (kc.TensorBoard("board", update_freq=1), True),
        (LogsEachBatch("log.csv"), True),
        (WarmUp([], 1, 1), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_callbacks_need_global_batches(callback: kc.Callback, needs: bool) -> None:
    assert need_global_batches([kc.History(), callback], TRAIN_METHODS) is needs


def test_writers_run_on_rank_0_alone() -> None:
    class Named(kc.ModelCheckpoint):
        pass

    everywhere = [kc.EarlyStopping(), OnBatches()]
    writers = [Named("m.keras"), kc.CSVLogger("log.csv"), kc.BackupAndRestore("backup")]
    assert callbacks_of_rank([*everywhere, *writers], is_first=True) == [*everywhere, *writers]
    assert callbacks_of_rank([*writers, *everywhere], is_first=False) == everywhere


def test_only_rank_0_is_verbose() -> None:
    assert resolve_verbose(1, Rank(1, 2, 1, 2)) == 0
    assert resolve_verbose("auto", Rank(0, 1, 0, 1)) == 2  # pytest's output is no terminal
    assert resolve_verbose(0, Rank(0, 1, 0, 1)) == 0


# Steps.


def test_steps_of_one_execution_are_alike() -> None:
    def share(examples: int, global_examples: int) -> Share:
        return Share(((),), examples, global_examples, 0, 0)

    full, tail, idle = share(4, 8), share(2, 5), share(0, 1)
    found = list(grouped([full, full, full, tail, full, idle, idle], 2))
    assert found == [[full, full, full], [tail], [full], [idle], [idle]]
    # The rank that has the only example groups as the one that has none.
    only = share(1, 1)
    assert list(grouped([only, only], 2)) == [[only], [only]]


# run_dir.


def test_run_dir(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a" / "b")
    run_dir.begin(0)
    run_dir.write_config({"seed": 1, "path": Path("x")})
    row = {"epoch": 1, "loss": 0.5, "val_loss": 1.0, "another": 2, "learning_rate": 0.1}
    run_dir.metrics.append([{"epoch": 1, "loss": 0.25}], ["epoch", "loss", "val_loss"])
    run_dir.metrics.append([row], ["another"])
    run_dir.begin(0)
    with pytest.raises(UsageError, match="contains another run"):
        RunDir(tmp_path / "a" / "b").begin(0)
    with (run_dir.path / "metrics.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"epoch": "1", "loss": "0.25", "val_loss": "", "another": ""},
            {"epoch": "1", "loss": "0.5", "val_loss": "1.0", "another": "2"},
        ]
    run_dir.metrics.append([{"loss": np.array([0.5, 1.0])}], [])
    assert (run_dir.path / "metrics.csv").read_text().endswith(',"[0.5, 1.0]",,\n')
    assert json.loads((run_dir.path / "config.json").read_text()) == {"path": "x", "seed": 1}
    Strategy().save(small(), run_dir.model)
    assert sorted(p.name for p in run_dir.path.iterdir()) == [
        "config.json",
        "metrics.csv",
        "model.keras",
    ]


def test_two_runs_at_once(tmp_path: Path) -> None:
    """The second is refused before the first has written a line; of a lock that has ended nothing stays."""
    first, second = RunDir(tmp_path), RunDir(tmp_path)
    first.begin(0)
    first.lock()
    second.begin(0)
    with pytest.raises(UsageError, match=f"run_dir .* is in use by process {os.getpid()} on "):
        second.lock()
    second.release()
    first.keep()
    first.release()
    assert list(tmp_path.iterdir()) == []
    second.lock()
    with pytest.raises(UsageError, match="is in use"):
        first.lock()
    second.release()


def test_the_lock_of_a_fit(tmp_path: Path) -> None:
    said: list[str] = []

    class Another(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            with pytest.raises(UsageError) as refused:
                trainer().fit(x, x, verbose=0)
            said.append(str(refused.value))

    def trainer() -> Any:
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        return hvdtrain.Trainer(model, "sgd", "mse", global_batch_size=4, run_dir=tmp_path)

    x = np.zeros((4, 1))
    trainer().fit(x, x, verbose=0, callbacks=Another())
    assert len(said) == 1 and "is in use by process" in said[0]
    assert not (tmp_path / "lock").exists()
    assert len((tmp_path / "metrics.csv").read_text().split()) == 2


def test_another_fit_continues_the_numbers_of_the_epochs(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for _ in range(2):
        run_dir.begin(0)
        for epoch in (1, 2):
            run_dir.metrics.append([{"epoch": epoch, "loss": 0.5}], ["epoch", "loss"])
    table = (tmp_path / "metrics.csv").read_text().split()
    assert table == ["epoch,loss", "1,0.5", "2,0.5", "3,0.5", "4,0.5"]


def test_a_table_of_another_program_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,2\n")
    EpochTable(path, lambda: None).append([{"epoch": 2, "loss": 1}], ["epoch", "loss"])
    assert path.read_text().split() == ["step,loss,epoch", "1,2,", ",1,2"]


def test_a_damaged_table_ends_no_training(tmp_path: Path) -> None:
    """Lines of earlier epochs stay, whatever is between them."""
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"epoch,loss\n1,0.5\n\xff\xfe\x00\n2,0.25\xff\n")
    EpochTable(path, lambda: None).append([{"epoch": 3, "loss": 1}], ["epoch", "loss"])
    assert path.read_bytes().split() == [b"epoch,loss", b"1,0.5", b"2,0.25\xff", b"3,1"]
    path.write_text(f"epoch,loss\n1,{'9' * 200_000}\n")
    with pytest.warns(UserWarning, match="field larger than field limit"):
        EpochTable(path, lambda: None).append([{"epoch": 2, "loss": 1}], ["epoch", "loss"])


def test_lines_that_cannot_be_written_are_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    table = EpochTable(folder / "metrics.csv", lambda: None)
    rows = [{"epoch": epoch, "loss": 1 / epoch} for epoch in (1, 2, 3, 4)]
    table.append(rows[:1], ["epoch", "loss"])
    folder.rename(tmp_path / "away")
    with pytest.warns(
        UserWarning, match=r"metrics\.csv cannot be written: .*\. Training continues"
    ):
        table.append(rows[1:2], [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.append(rows[2:3], [])
    (tmp_path / "away").rename(folder)
    table.append(rows[3:], [])
    lines = (folder / "metrics.csv").read_text().split()
    assert lines[0] == "epoch,loss" and [line[0] for line in lines[1:]] == ["1", "2", "3", "4"]


def test_a_run_dir_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="run' cannot be created: "):
        RunDir(tmp_path / "file" / "run").begin(0)


def test_splitting_a_tuple_keeps_the_weights_beside_it() -> None:
    x, weight = np.arange(10.0), np.arange(10.0) / 2
    train, validation = split_arrays((x, 2 * x), None, weight, 0.2)
    assert [part.tolist() for part in train] == [
        x[:8].tolist(),
        (2 * x[:8]).tolist(),
        weight[:8].tolist(),
    ]
    assert [part.tolist() for part in validation] == [[8, 9], [16, 18], [4, 4.5]]


def test_a_run_that_goes_on_adds_to_the_metrics(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    for epoch in (1, 2, 3):
        first.metrics.append([{"epoch": epoch, "loss": 1 / epoch}], ["epoch", "loss"])
    again = RunDir(tmp_path)
    again.begin(2)
    # It goes on after epoch 2: what was written of the third is written again, now with another column.
    again.metrics.append(
        [{"epoch": 3, "loss": 0.25, "val_loss": 0.5}], ["epoch", "loss", "val_loss"]
    )
    assert (tmp_path / "metrics.csv").read_text().split() == [
        *("epoch,loss,val_loss", "1,1.0,", "2,0.5,", "3,0.25,0.5"),
    ]


# What the user gave.


def test_model() -> None:
    model = small()
    assert make_model(model, None, Strategy().build) is model
    with pytest.raises(UsageError, match="built with 'float32': pass a function"):
        make_model(model, "mixed_bfloat16", Strategy().build)
    with pytest.raises(UsageError, match=r"or a function that builds one, not int"):
        make_model(3, None, Strategy().build)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="returned int"):
        make_model(lambda: 3, None, Strategy().build)  # type: ignore[arg-type, return-value]
    try:
        built = make_model(small, "mixed_bfloat16", Strategy().build)
    finally:
        keras.config.set_dtype_policy("float32")
    assert built.layers[-1].compute_dtype == "bfloat16"


def arguments(*given: str | None) -> dict[str, str | None]:
    names = ("optimizer", "loss", "metrics", "weighted_metrics", "loss_weights")
    return dict.fromkeys(names) | dict(zip(names, given, strict=False))


def test_compile_arguments() -> None:
    model = small()
    model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    kept = compile_arguments(model, arguments())
    assert kept["optimizer"] is model.optimizer
    assert (kept["loss"], kept["metrics"]) == ("mse", ["mae"])
    assert compile_arguments(model, arguments("sgd", "mae"))["loss"] == "mae"
    assert isinstance(
        compile_arguments(small(), arguments(None, "mse"))["optimizer"],
        keras.optimizers.RMSprop,
    )
    with pytest.raises(UsageError, match="'sdg'"):
        compile_arguments(model, arguments("sdg"))


def test_symbolic_data() -> None:
    x = {"a": np.zeros((5, 3)), "b": [np.array(["x"] * 5), np.zeros((5, 2, 2), "int8")]}
    data = symbolic_data(make_source(x, np.zeros(5), **BATCHES).element, 4)
    assert [type(part) for part in data] == [dict, keras.KerasTensor]
    leaves = [data[0]["a"], *data[0]["b"], data[1]]
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [
        ((4, 3), "float32"),
        ((4,), "string"),
        ((4, 2, 2), "int8"),
        ((4,), "float32"),
    ]
    words = tf.data.Dataset.from_tensor_slices(["a", "b"]).batch(2)
    assert symbolic_data(make_source(words, **BATCHES).element, 1)[0].dtype == "string"


BATCHES: dict[str, Any] = {"global_batch_size": 4, "shuffle": False, "seed": 0}


@pytest.mark.filterwarnings("ignore:the data ran out")
@pytest.mark.parametrize(("steps", "examples"), [(None, 10), (2, 8), (3, 10), (9, 10)])
def test_evaluation_counts_no_example_twice(steps: int | None, examples: int) -> None:
    source = make_source(np.zeros((10, 1)), steps_per_epoch=steps, **BATCHES)
    shares = list(source.epoch(0, 0, 1))
    assert sum(share.examples for share in shares) == examples


def test_evaluation_of_a_stream_begins_anew() -> None:
    data = tf.data.Dataset.range(100).batch(4)
    source = make_source(data, steps_per_epoch=2, **BATCHES)
    assert [s.data.tolist() for s in source.epoch(0, 0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [s.data.tolist() for s in source.epoch(0, 0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [s.data[0] for s in source.epoch(1, 0, 1)] == [8, 12]


def test_an_iterator_goes_on_where_it_was() -> None:
    source = make_source((np.full((4, 1), i) for i in range(9)), steps_per_epoch=2, **BATCHES)
    assert source.element
    assert [int(s.data[0, 0]) for s in source.epoch(0, 0, 1)] == [0, 1]
    assert [int(s.data[0, 0]) for s in source.epoch(0, 0, 1)] == [2, 3]


# Metrics.


def test_state_of_metrics_goes_there_and_back() -> None:
    metrics = [keras.metrics.MeanSquaredError(), keras.metrics.AUC()]
    check_additive(metrics)
    for metric in metrics:
        metric.update_state([0, 1, 1], [0.2, 0.4, 0.9])
    state, results = read_state(metrics), [float(m.result()) for m in metrics]
    for metric in metrics:
        metric.update_state([0, 1], [1.0, 0.0])
    assert [float(m.result()) for m in metrics] != results
    write_state(metrics, state)
    assert [float(m.result()) for m in metrics] == results
    with pytest.raises(UsageError, match="not zero"):
        check_additive(metrics)


# Agreement.


def test_require_equal_names_what_and_who() -> None:
    facts: list[dict[str, Any]] = [{"steps": 5}, {"steps": 5}, {"steps": 6, "extra": "x" * 500}]

    def work(ranks: Communicator) -> None:
        consistency.require_equal(facts[ranks.rank()], "training", ranks=ranks)

    for error in run_ranks(thread_ranks(3), work):
        assert isinstance(error, ReplicaError)
        assert "extra is missing on rank 0 and" in str(error)
        assert "on rank 2" in str(error)
        assert "; steps is 5 on rank 0 and 6 on rank 2" in str(error)
        assert len(str(error)) < 600
    facts[2] = {"steps": 6}
    said = "before training: steps is 5 on rank 0 and 6 on rank 2"
    assert all(said in str(error) for error in run_ranks(thread_ranks(3), work))


def test_one_rank_sets_a_flag_for_all() -> None:
    def work(ranks: Communicator) -> list[bool]:
        mine = ranks.rank() == 1
        return [
            consistency.any_rank(mine, "one", ranks),
            consistency.any_rank(False, "none", ranks),
        ]

    assert run_ranks(thread_ranks(2), work) == [[True, False]] * 2


# Errors of the engine.


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InternalError(None, None, "Horovod has been shut down."),
        ValueError("Horovod has not been initialized properly; use hvd.init()."),
    ],
)
def test_an_engine_that_is_gone_says_that_another_rank_is(error: Exception) -> None:
    says = r"Rank 1: .* Another rank failed or ended"
    with pytest.raises(EngineError, match=says), engine_errors(Rank(1, 2, 1, 2)):
        raise error


def test_ranks_that_share_a_gpu_are_told_so() -> None:
    said = "{{function_node HorovodAllgather}} ncclCommInitRank failed: invalid usage"
    error = tf.errors.UnknownError(None, None, said)
    with pytest.raises(EngineError, match="one rank per GPU"), engine_errors(Rank(1, 2, 1, 2)):
        raise error


def test_other_errors_stay() -> None:
    with pytest.raises(ValueError, match="own"), engine_errors(Rank(0, 2, 0, 2)):
        raise ValueError("the user's own")
