"""A loss that becomes nan: the step, the rank and the examples are those that had it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.checkpoint.background_write import BackgroundWrite
from hvdtrain.collectives.communicator import LoneRank
from hvdtrain.data import Part
from hvdtrain.data.share import Share
from hvdtrain.trainer import periodic_check
from hvdtrain.trainer.divergence import LossWatch, checked_policy

EXAMPLES, BATCH, BAD = 40, 8, 21


def model() -> keras.Model:
    keras.backend.clear_session()
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype("float32")
    x[BAD] = np.nan
    return x, x[:, :1]


def trainer(run_dir: Path | None, **options: object) -> hvdtrain.Trainer:
    return hvdtrain.Trainer(
        model, "sgd", "mse", global_batch_size=BATCH, run_dir=run_dir, **options
    )


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_example_is_among_those_named(shuffle: bool, steps: int, tmp_path: Path) -> None:
    with pytest.raises(hvdtrain.DivergedError) as raised:
        one = trainer(tmp_path, on_nan="stop", steps_per_execution=steps)
        one.fit(*data(), epochs=2, shuffle=shuffle, verbose=0)
    found = json.loads((tmp_path / "diverged.jsonl").read_text())
    order = np.random.default_rng([0, 0]).permutation(EXAMPLES) if shuffle else range(EXAMPLES)
    step = list(order).index(BAD) // BATCH
    # Of steps that ran at once the last one is told.
    step = min(step // steps * steps + steps, EXAMPLES // BATCH) - 1
    assert (found["step"], found["epoch"], found["rank"]) == (step + 1, 1, 0)
    assert found["examples"] == [int(i) for i in order[step * BATCH : (step + 1) * BATCH]]
    assert f"step {step + 1} of epoch 1 on rank 0" in str(raised.value)
    assert str(tmp_path / "diverged.jsonl") in str(raised.value)
    assert not (tmp_path / "model.keras").exists()


def test_without_it_the_training_goes_on_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="has become nan or inf"):
        assert len(trainer(None).fit(*data(), epochs=2, verbose=0).epoch) == 2


def test_weights_that_the_loss_does_not_show(tmp_path: Path) -> None:
    class Spoil(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == EXAMPLES // BATCH - 1:
                self.model.layers[-1].bias.assign([np.inf])

    x = np.ones((EXAMPLES, 3), "float32")
    with pytest.raises(hvdtrain.DivergedError, match="bias' has become nan or inf after epoch 1"):
        trainer(tmp_path, on_nan="stop").fit(x, x[:, :1], callbacks=Spoil(), verbose=0)


def test_a_stream_has_no_numbers() -> None:
    stream: Any = object()
    watch = LossWatch("stop", stream, Part(0, 1), None, ranks=LoneRank(0))
    share = Share(((),), 4, 8, 4, None)
    watch.add(0, 6, 1, {"accuracy": np.nan, "d_loss": 1.0}, share)
    watch.look(now=True)
    watch.add(2, 7, 1, {"d_loss": np.float32(-np.inf)}, share)
    with pytest.raises(hvdtrain.DivergedError) as raised:
        watch.look(now=True)
    assert "became -inf in step 8 of epoch 3" in str(raised.value)
    assert "examples 4 to 7 of the global batch" in str(raised.value)


def test_what_cannot_work() -> None:
    with pytest.raises(hvdtrain.UsageError, match="on_nan='go': choose one of 'warn', 'stop'"):
        trainer(None, on_nan="go")
    with pytest.raises(hvdtrain.UsageError, match="goes back to the newest checkpoint: pass"):
        trainer(None, on_nan="rewind")
    other: Any = SimpleNamespace(name="tpu")
    with pytest.raises(hvdtrain.UsageError, match=r"works with strategy='horovod' \(here: tpu\)"):
        checked_policy("stop", other, saves=False)


def test_several_optimizers_do_not_skip() -> None:
    class Two(keras.Sequential):
        def __init__(self, layers: Any) -> None:
            super().__init__(layers)
            self.other = keras.optimizers.SGD()

        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    def build() -> keras.Model:
        return Two([keras.Input((3,)), keras.layers.Dense(1)])

    with pytest.raises(hvdtrain.UsageError, match="models with one optimizer, and Two has 2"):
        hvdtrain.Trainer(build, "sgd", "mse", global_batch_size=BATCH, on_nan="skip")


def test_steps_skipped_by_an_earlier_fit_are_not_told_again(tmp_path: Path) -> None:
    one = trainer(tmp_path, on_nan="skip")
    with pytest.warns(UserWarning, match="skipped"):
        one.fit(*data(), verbose=0)
    good = np.ones((EXAMPLES, 3), "float32")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*skipped")
        one.fit(good, good[:, :1], verbose=0)


def test_training_that_skips_nothing_is_the_same_to_the_bit(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype("float32")
    weights = []
    for policy in ("warn", "skip"):
        one = trainer(None, on_nan=policy)
        one.fit(x, x[:, :1], epochs=2, verbose=0)
        weights.append(one.model.get_weights())
    np.testing.assert_equal(*weights)
    one.save(tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    assert not isinstance(plain.optimizer, keras.optimizers.LossScaleOptimizer)
    assert plain.optimizer.iterations == one.model.optimizer.iterations


@pytest.mark.slow
def test_a_run_goes_on_with_another_policy(tmp_path: Path) -> None:
    x = np.ones((EXAMPLES, 3), "float32")
    for epoch, policy in enumerate(("warn", "skip", "stop"), start=1):
        one = trainer(tmp_path, on_nan=policy, checkpoints=hvdtrain.Checkpoints())
        one.fit(x, x[:, :1], epochs=epoch, verbose=0)
        assert one.model.optimizer.iterations == epoch * EXAMPLES // BATCH
        other = trainer(None, on_nan="warn" if policy == "skip" else "skip")
        other.fit(x, x[:, :1], verbose=0)
        one.save(tmp_path / "one.keras")
        other.load(tmp_path / "one.keras")
        assert other.model.optimizer.iterations == one.model.optimizer.iterations


class Absolute(keras.Sequential):
    """A step of its own, whose loss the optimizer does not see, and whose gradients are finite where that is not."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


def test_an_infinite_loss_that_is_not_skipped_is_told(tmp_path: Path) -> None:
    x = np.ones((EXAMPLES, 3), "float32")
    y = x[:, :1].copy()
    y[BAD] = np.inf
    one = hvdtrain.Trainer(
        lambda: Absolute([keras.Input((3,)), keras.layers.Dense(1)]),
        "sgd",
        "mae",
        global_batch_size=BATCH,
        run_dir=tmp_path,
        on_nan="skip",
    )
    with pytest.warns(UserWarning, match=r"step 3 .*diverged\.jsonl.* not skipped, .*scale_loss"):
        one.fit(x, y, shuffle=False, verbose=0)
    # And not once more for each later step of the epoch, whose mean is infinite as well.
    assert len((tmp_path / "diverged.jsonl").read_text().splitlines()) == 1


def test_no_checkpoint_holds_what_an_infinite_loss_made_of_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackgroundWrite, "has_ended", True)  # Wait for each, and leave none out.
    x = np.ones((EXAMPLES, 3), "float32")
    y = x[:, :1].copy()
    y[BAD] = np.inf  # The gradients of an absolute error are finite.
    schedule = hvdtrain.Checkpoints(every_steps=1)
    one = hvdtrain.Trainer(
        model, "sgd", "mae", global_batch_size=BATCH, run_dir=tmp_path, on_nan="rewind",
        checkpoints=schedule,
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"inf in step 3 .* checkpoint of step 2 was restored"):
        history = one.fit(x, y, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"][0])


class Taught(keras.Model):
    """A student, and a teacher that follows it: a moving average of its weights, made by the step itself."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.student, self.teacher = (
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]) for _ in range(2)
        )
        self.teacher.trainable = not frozen

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.student(x) - y))
        weights = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for mine, theirs in zip(self.teacher.weights, self.student.weights, strict=True):
            mine.assign(0.9 * mine + 0.1 * theirs)
        return {"loss": loss}


@pytest.mark.parametrize("frozen", [True, False])
def test_a_teacher_does_not_follow_a_skipped_step(frozen: bool) -> None:
    x, y = data()
    bad = range(BAD // BATCH * BATCH, (BAD // BATCH + 1) * BATCH)
    weights = []
    for left_out in ([], bad):
        keras.utils.set_random_seed(1)
        one = hvdtrain.Trainer(Taught(frozen), "sgd", "mse", global_batch_size=BATCH, on_nan="skip")
        rest = np.delete(np.arange(EXAMPLES), left_out)
        one.fit(x[rest], y[rest], shuffle=False, verbose=0)
        weights.append([v.numpy() for v in one.model.weights])
    np.testing.assert_equal(*weights)


def test_an_infinite_loss_is_skipped_though_its_gradients_are_finite() -> None:
    x = np.ones((EXAMPLES, 3), "float32")
    y = x[:, :1].copy()
    y[BAD] = 1e25
    one = trainer(None, on_nan="skip")
    with pytest.warns(UserWarning, match="The loss became inf in step 3 of epoch 1"):
        history = one.fit(x, y, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"][0]) and one.model.optimizer.iterations == 4


def test_a_rate_that_a_callback_has_set_outlasts_a_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []

    class Spoil(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (epoch + 1)
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))
            if (self.epoch, batch) == (1, 1):
                self.model.layers[-1].bias.assign([np.nan])

    monkeypatch.setattr(periodic_check, "CHECK_SECONDS", 0.0)
    x = np.ones((EXAMPLES, 3), "float32")
    one = trainer(tmp_path, on_nan="rewind", checkpoints=hvdtrain.Checkpoints())
    with pytest.warns(UserWarning, match="The checkpoint of step 5 was restored"):
        one.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=Spoil())
    np.testing.assert_allclose(rates, [0.1] * 5 + [0.05] * 5)


def test_epochs_that_all_end_in_a_return_end_the_training(tmp_path: Path) -> None:
    """Each is saved as it ends, under a number of its own, and is the same checkpoint again."""

    class Spoil(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.last = EXAMPLES // BATCH - 1 if epoch > 0 else -1

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == self.last:
                self.model.layers[-1].bias.assign([np.nan])

    x = np.ones((EXAMPLES, 3), "float32")
    one = trainer(tmp_path, on_nan="rewind", checkpoints=hvdtrain.Checkpoints())
    with (
        pytest.warns(UserWarning, match="The checkpoint of step 5 was restored"),
        pytest.raises(hvdtrain.DivergedError, match="after 3 returns to the checkpoint of step 5"),
    ):
        one.fit(x, x[:, :1], epochs=9, verbose=0, callbacks=Spoil())


def test_averages_that_were_in_the_model_when_an_epoch_ended_are_not_after_a_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []

    class Spoil(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.begins = epoch == 1
            weights.append(self.model.get_weights())

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            if self.begins and batch == 2:
                weights.append(self.model.get_weights())

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if self.begins and batch == 0:
                self.model.layers[-1].bias.assign([np.nan])

    monkeypatch.setattr(periodic_check, "CHECK_SECONDS", 0.0)
    x = np.ones((EXAMPLES, 3), "float32")
    one = hvdtrain.Trainer(
        model, keras.optimizers.SGD(use_ema=True), "mse", global_batch_size=BATCH, run_dir=tmp_path,
        on_nan="rewind", checkpoints=hvdtrain.Checkpoints(),
    )  # fmt: skip
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    with pytest.warns(UserWarning, match="The checkpoint of step 5 was restored"):
        one.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[swap, Spoil()])
    np.testing.assert_allclose(weights[2][0], weights[1][0], rtol=1e-6)
