"""What a resumed fit does beside its state: its lock, the files of others, what callbacks remember."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain.checkpoint.callback_states import CallbackStates, continue_files
from hvdtrain.checkpoint.folder import Checkpoint
from hvdtrain.checkpoint.lock import lock_folder, lock_kept
from hvdtrain.checkpoint.position import FitPosition
from hvdtrain.checkpoint.save_schedule import Checkpoints
from hvdtrain.collectives.communicator import LoneRank
from hvdtrain.collectives.consistency import raise_alike
from hvdtrain.collectives.finite import is_finite
from hvdtrain.environment import EXIT_PREEMPTED
from hvdtrain.errors import UsageError
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.strategy import Strategy
from hvdtrain.trainer import periodic_check, preemption, resume
from hvdtrain.trainer.resume import FitCheckpoints, fit_checkpoints
from hvdtrain.trainer.run_dir import RunDir


def test_two_runs_in_one_folder_are_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    first = lock_folder(tmp_path, "run_dir 'runs/a'")
    with pytest.raises(UsageError, match=rf"'runs/a' is in use by process {os.getpid()} on"):
        lock_folder(tmp_path, "run_dir 'runs/a'")
    os.close(first)
    os.close(lock_folder(tmp_path, "run_dir 'runs/a'"))


def test_a_process_that_a_killed_run_has_forked_does_not_hold_its_folder(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path, "run")
    wait, end = os.pipe()
    begun, begin = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a fork beside threads.
        forked = os.fork()
    if forked == 0:
        os.write(begin, b".")
        os.read(wait, 1)
        os._exit(0)
    try:
        os.read(begun, 1)
        os.close(lock)
        os.close(lock_folder(tmp_path, "run"))
    finally:
        os.write(end, b".")
        os.waitpid(forked, 0)
        for descriptor in (wait, end, begun, begin):
            os.close(descriptor)


def test_a_folder_that_was_moved_while_its_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    first = lock_folder(folder, "run")
    assert lock_kept(folder, "run", first) == first
    shutil.move(tmp_path / "run", tmp_path / "moved")
    first = lock_kept(folder, "run", first)
    # Now it has the new folder, in which no other run begins.
    with pytest.raises(UsageError, match="in use"):
        lock_folder(folder, "run")
    os.close(first)
    # One that has begun there before is left in peace.
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "file.write('process 7'); file.flush(); print(flush=True); sys.stdin.read()"
    )
    stale = os.open(tmp_path / "moved" / "checkpoints" / "lock", os.O_RDWR)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, str(folder / "lock")]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        with pytest.raises(OSError, match="moved or removed, and run is in use by process 7"):
            lock_kept(folder, "run", stale)
        other.stdin.close()
    with pytest.raises(OSError, match="run now belongs to another run"):
        lock_kept(folder, "run", stale)
    os.close(stale)


@pytest.mark.parametrize(
    "given, message",
    [
        ((Checkpoints(), "auto", None), "needs run_dir"),
        ((True, "auto", RunDir("a")), r"checkpoints=True: pass hvdtrain.Checkpoints\(\.\.\.\)"),
        ((None, "must", RunDir("a")), "needs checkpoints="),
        ((Checkpoints(), "yes", RunDir("a")), "'auto', 'never' or 'must'"),
        ((Checkpoints(), "auto", RunDir("a")), "strategy='horovod'"),
    ],
)
def test_what_cannot_work_is_said_at_once(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit_checkpoints(*given, Strategy())


def test_the_command_line_goes_before_the_argument(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: Any = (RunDir(tmp_path), object.__new__(HorovodStrategy))
    monkeypatch.setenv("HVDTRAIN_RESUME", "must")
    found = fit_checkpoints(Checkpoints(), "never", *given)
    assert found is not None and found._resume == "must"
    monkeypatch.setenv("HVDTRAIN_RESUME", "yes")
    with pytest.raises(UsageError, match=r"resume='yes' \(or HVDTRAIN_RESUME\)"):
        fit_checkpoints(Checkpoints(), "auto", *given)


def test_checkpoints_by_the_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps of 0.1 s, looked at once a second: saved at the first look after each minute."""
    clock = SimpleNamespace(monotonic=lambda: now)
    now = 0.0
    monkeypatch.setattr(resume, "time", clock)
    monkeypatch.setattr(periodic_check, "time", clock)
    strategy = object.__new__(HorovodStrategy)
    saved = FitCheckpoints(Checkpoints(every_minutes=1), "auto", RunDir(tmp_path), strategy)
    saved._preemption = preemption.Preemption(LoneRank(0))
    at = []
    for saved.steps in range(1, 2000):
        now += 0.1
        assert not saved.should_stop()
        if saved.is_due():
            at.append(now)
            saved._saved_at = now  # As `save` does.
    assert len(at) == 3
    for before, after in zip([0.0, *at], at, strict=False):
        assert 60 <= after - before <= 61.2


def test_a_file_tells_the_job_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, file = 0.0, tmp_path / "preempted"
    monkeypatch.setattr(periodic_check, "time", SimpleNamespace(monotonic=lambda: now))
    strategy = object.__new__(HorovodStrategy)
    schedule = Checkpoints(preemption_file=str(file))
    saved = FitCheckpoints(schedule, "auto", RunDir(tmp_path), strategy)
    saved._preemption._check = periodic_check.PeriodicCheck("preempted", LoneRank(0))
    ended = []
    for saved.steps in range(1, 100):
        now += 0.1
        if saved.steps == 50:
            file.touch()
        ended += [saved.steps] if saved.should_stop() else []
    assert 50 <= ended[0] <= 62, "steps of 0.1 s, looked at once a second"
    assert not saved.should_stop() and saved.should_stop(now=True)
    assert f"was asked to stop (by the file '{file}'), and stopped after" in str(saved.preempted())
    # Its file system has gone.
    monkeypatch.setattr(os, "stat", lambda *_, **__: (_ for _ in ()).throw(OSError(116, "Stale")))
    assert not saved._preemption.by_file
    monkeypatch.undo()
    file.unlink()
    assert "was asked to stop, and stopped after 99 steps" in str(saved.preempted())


class SlowDisk:
    """Stands for `folder.save`: notes what it has written; waits for `free`, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.free, self.fails, self.written = threading.Event(), fails, []
        self.begun = threading.Semaphore(0)

    def save(self, folder: Path, number: int, checkpoint: Checkpoint, keep: int) -> None:
        self.begun.release()
        assert self.free.wait(60)
        if self.fails:
            raise OSError(28, "No space left on device")
        self.written.append((number, float(checkpoint.arrays["w"])))


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What begins a fit on a disk, and saves after a step, whose number is the weight."""

    def begin(disk: SlowDisk, schedule: Checkpoints | None = None) -> tuple[FitCheckpoints, Any]:
        strategy = object.__new__(HorovodStrategy)
        saved = FitCheckpoints(schedule or Checkpoints(1), "auto", RunDir(tmp_path), strategy)
        monkeypatch.setattr(resume, "save", disk.save)
        monkeypatch.setattr(resume, "ALL_RANKS", LoneRank(0))
        monkeypatch.setattr(resume, "on_first", lambda do, name: do())
        monkeypatch.setattr(resume, "TrainingState", lambda model, strategy: state)
        state = SimpleNamespace(
            own=lambda *_: {}, variables=lambda: {"w": np.array(weight["w"])}, untrained=set()
        )
        weight = {"w": 0.0}

        def step(number: int, last: bool = False, value: float | None = None) -> None:
            saved.steps = number
            weight["w"] = number if value is None else value
            saved.save(keras.Sequential(), {}, FitPosition(0, number), last=last)

        return saved, step

    return begin


def test_a_step_does_not_wait_for_the_disk_and_the_last_one_does(saving: Any) -> None:
    disk = SlowDisk()
    saved, step = saving(disk)
    step(1)
    disk.begun.acquire()
    assert not disk.written and not saved.exists
    step(2)  # Left out: the first one is still being written.
    threading.Timer(0.2, disk.free.set).start()
    step(3, last=True)
    assert disk.written == [(1, 1.0), (3, 3.0)] and saved.exists


def test_a_fit_that_fails_waits_for_what_is_being_written(saving: Any) -> None:
    disk = SlowDisk()
    saved, step = saving(disk)
    with pytest.raises(KeyboardInterrupt), saved.opened(0, {}):
        step(1)
        threading.Timer(0.2, disk.free.set).start()
        raise KeyboardInterrupt
    assert disk.written == [(1, 1.0)] and saved.exists


def test_a_full_disk_and_weights_that_are_nan_are_warned_of_once_each(saving: Any) -> None:
    disk = SlowDisk(fails=True)
    disk.free.set()
    saved, step = saving(disk)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(1, last=True)
        assert not saved.exists
        disk.fails = False
        step(2, last=True, value=float("nan"))
        step(3, last=True)
    assert [str(one.message).partition(":")[0] for one in caught] == [
        "No checkpoint was written after step 1",
        "No checkpoint was written after step 2",
    ]
    assert disk.written == [(3, 3.0)]


def test_a_job_that_could_not_save_is_not_started_again_for_ever(saving: Any) -> None:
    disk = SlowDisk(fails=True)
    disk.free.set()
    saved, step = saving(disk)
    with warnings.catch_warnings(record=True):
        step(1, last=True)
        error = saved.preempted()
        assert error.exit_code == 1 and "no checkpoint could be written" in str(error)
        disk.fails = False
        step(2, last=True)
        error = saved.preempted()
        assert error.exit_code == EXIT_PREEMPTED and "after 2 steps. Run the same" in str(error)
        disk.fails = True
        step(5, last=True)
        error = saved.preempted()
    assert error.exit_code == EXIT_PREEMPTED
    assert "after 5 steps, of which the last 3 are lost" in str(error)


def test_a_training_that_cannot_save_ends_where_it_is_asked_to(
    saving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(fails=True)
    disk.free.set()
    _saved, step = saving(disk, Checkpoints(1, max_failures=2))
    monkeypatch.setattr(resume, "raise_alike", partial(raise_alike, ranks=LoneRank(0)))
    with warnings.catch_warnings(record=True):
        for number in (1, 2):  # One that was written begins the count anew.
            disk.fails = number == 1
            step(number, last=True)
        disk.fails = True
        step(3, last=True)
        step(4, last=True)
        told = r"2 checkpoints in a row .*, the last one after step 4: .*max_failures=2"
        with pytest.raises(UsageError, match=told):
            step(5)
    assert disk.written == [(2, 2.0)]


def test_a_warning_that_is_an_error_keeps_no_lock(saving: Any, tmp_path: Path) -> None:
    disk = SlowDisk(fails=True)
    disk.free.set()
    saved, step = saving(disk)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            pytest.raises(UserWarning, match="No checkpoint was written after step 1"),
            saved.opened(0, {}),
        ):
            step(1)
    os.close(lock_folder(tmp_path / "checkpoints", "checkpoints"))


def test_a_schedule_that_cannot_work() -> None:
    for steps in (0, 2.5, "5"):
        with pytest.raises(UsageError, match=f"every_steps={steps!r}: pass an integer"):
            Checkpoints(every_steps=steps)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_failures=0"):
        Checkpoints(max_failures=0)
    for minutes in (0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="every_minutes="):
            Checkpoints(every_minutes=minutes)
    with pytest.raises(UsageError, match="keep=1"):
        Checkpoints(keep=1)
    for name in ("mirror", "preemption_file"):
        with pytest.raises(UsageError, match=f"{name}=3: pass a path"):
            Checkpoints(**{name: 3})  # type: ignore[arg-type]


def test_a_csv_logger_goes_on_without_the_lines_that_come_again(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("epoch;loss\n0;1.0\n1;0.5\n2;0.25\n")
    logger = keras.callbacks.CSVLogger(path, separator=";")
    other = keras.callbacks.Callback()
    other.filename = None
    continue_files([logger, other], epoch=1)
    assert path.read_text().split() == ["epoch;loss", "0;1.0"]
    logger.on_train_begin()
    logger.on_epoch_end(1, {"loss": 0.5})
    logger.on_train_end()
    assert path.read_text().split()[:2] == ["epoch;loss", "0;1.0"]
    assert path.read_text().split()[2].startswith("1;0.5")


def test_a_csv_file_that_cannot_be_read_is_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    content = b"epoch,loss\n0,1.0\n1,0.5\xff\n"
    path.write_bytes(content)
    logger = keras.callbacks.CSVLogger(path)
    with pytest.warns(UserWarning, match=r"log\.csv cannot be rewritten: .*Training continues"):
        continue_files([logger], epoch=1)
    assert path.read_bytes() == content and logger.append


def stopping() -> keras.callbacks.EarlyStopping:
    callback = keras.callbacks.EarlyStopping("loss", patience=2, min_delta=0.1)
    callback.set_model(keras.Sequential())
    callback.on_train_begin()
    return callback


def test_early_stopping_goes_on_counting() -> None:
    first = stopping()
    states = CallbackStates([first])
    for epoch, loss in enumerate([1.0, 1.0]):
        first.on_epoch_end(epoch, {"loss": loss})
    second = stopping()
    CallbackStates([keras.callbacks.TerminateOnNaN(), second]).give(states.take())
    assert (second.wait, second.best) == (first.wait, first.best) == (1, 1.0)
    second.on_epoch_end(2, {"loss": 0.95})
    assert second.model.stop_training  # 0.95 is no improvement by 0.1: min_delta has its sign once.


class Held(keras.callbacks.Callback):
    """Keeps what cannot be written."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.file = np.zeros(2), object()


def test_what_is_not_kept_is_named_once() -> None:
    callback = Held()
    states = CallbackStates([callback])
    callback.count = np.ones(2)
    callback.file = object()
    with pytest.warns(UserWarning, match="Held changed file during training"):
        found = states.take()
    assert list(found["Held 1"]) == ["count"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states.take()


def test_a_large_numberis_finite() -> None:
    assert is_finite(np.array([1e300]))
    assert is_finite(np.array([3]))
    assert not is_finite(np.array([np.nan], np.float16))
