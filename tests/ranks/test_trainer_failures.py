"""Ranks that disagree, drift apart or stop: an error on every rank that names what and who, never a hang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch import Results, launch, on_ranks

LIMIT_SECONDS = 180
"""A job that does not notice takes the 300 s for which a rank stays away."""


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("trainer_failures", np=2, timeout=240)


def messages(results: Results, case: str) -> dict[str, str]:
    """The case's messages, which are the same on both ranks."""
    first, second = results.of(case)
    assert first == second
    return first


@pytest.mark.parametrize(
    ("case", "variable", "when"),
    [
        ("case_reduction_removed", "/kernel'", "after the first step"),
        ("case_reduction_removed_in_a_continued_run", "/kernel'", "after the first step"),
        ("case_reduction_of_one_variable_removed", "/bias'", "after the first step"),
        ("case_weight_changed_on_one_rank", "/kernel'", "after epoch 1"),
        ("case_optimizer_changed_on_one_rank", "/kernel'", "after the first step"),
    ],
)
def test_drift(results: Results, case: str, variable: str, when: str) -> None:
    for message in results.of(case):
        assert message.startswith("ReplicaError: The replicas have drifted apart")
        assert when in message
        assert f"{variable} of rank 1 differs from that of rank 0" in message


DISAGREEMENTS = {
    "input shape": "the shape and dtype of an example",
    "examples": "the number of examples is 40 on rank 0 and 32 on rank 1",
    "steps": "the number of steps in an epoch is 5 on rank 0 and 4 on rank 1",
    "content": "rank 0 and rank 1 have different values for x",
    "labels": "rank 0 and rank 1 have different values for y",
    "dtype": "the shape and dtype of an example",
    "metrics": 'the metrics is ["loss", "mae"] on rank 0 and ["loss"] on rank 1',
    "model": "the model's variables",
    "layers": "the model's variables",
    "batch size": "global_batch_size is 8 on rank 0 and 4 on rank 1",
    "statistics": "different values for mean and variance 0 (normalization)",
    "adapted": "different values for the mean and variance 0 of 'normalization'",
    "learning rate": "learning_rate is 0.05",
    "optimizer": 'optimizer is "SGD" on rank 0 and "Adam" on rank 1',
    "epochs": "epochs is 3 on rank 0 and 2 on rank 1",
    "validation": "validation",
    "validation content": "different values for validation x",
    "callbacks": "callbacks is [] on rank 0",
    "callbacks of steps": "callbacks look at batches is [false, false] on rank 0 and [true, false]",
    "validation_freq": "validation_freq is 1 on rank 0 and 2 on rank 1",
    "on_nan": 'on_nan is "warn" on rank 0 and "stop" on rank 1',
    "checkpoints": 'checkpoints is {"every_steps": 2} on rank 0 and {"every_steps": 3} on rank 1',
    "evaluate": "the number of examples is 20 on rank 0 and 21 on rank 1",
    "predict": "the number of examples is 20 on rank 0 and 21 on rank 1",
}


def test_disagreements(results: Results) -> None:
    found = messages(results, "case_disagreements")
    assert set(found) == set(DISAGREEMENTS)
    for name, message in found.items():
        assert message.startswith("ReplicaError: The ranks disagree before"), name
        assert "rank 0" in message, name
        assert "rank 1" in message, name
        assert DISAGREEMENTS[name] in message, (name, message)


def test_a_layer_that_one_rank_has_adapted(results: Results) -> None:
    for by_first, by_all, wanted in results.of("case_adapted_by_one_rank"):
        assert by_first == pytest.approx(wanted, abs=1e-6)
        assert by_all == pytest.approx(wanted, abs=1e-6)


STREAMS = {
    "length": "the data of rank 0 ended after 3 steps, while rank 1 has more",
    "shorter": "the data of rank 1 ended after 3 steps, while rank 0 has more",
    "shuffle": "the batch of step 1 on rank 1 differs from that of rank 0",
    "shard": "the batch of step 1 on rank 1 differs from that of rank 0",
    "content": "the batch of step 1 on rank 1 differs from that of rank 0",
    "once": "it can be read only once",
}


def test_streams(results: Results) -> None:
    found = messages(results, "case_streams")
    assert set(found) == set(STREAMS)
    for name, message in found.items():
        assert STREAMS[name] in message, (name, message)


USAGE = {
    "no loss": "The model has no loss",
    "lengths": "x has 40, y has 39",
    "batch size": "global_batch_size 1 is smaller than the number of workers, 2",
    "empty": "the data is empty",
    "endless": "pass steps_per_epoch",
    "op": "op=Average",
    "model": "the function returned int",
    "scaling": "'cubic': choose one of none, linear, sqrt",
    "precision": "'float7'",
    "optimizer": "'sdg'",
    "compiled anew": "create a new one, Trainer(trainer.model",
    "frozen": "create a new one, Trainer(trainer.model",
    "whole batch": "The loss 'dice' is computed from sums over all examples of the batch",
    "several optimizers": "pass one optimizer for all weights",
    "own allreduce": "AveragesEach reduces its gradients over the workers itself",
    "own allreduce, eagerly": "AveragesEach reduces its gradients over the workers itself",
    "own grouped_allreduce": "AveragesAll reduces its gradients over the workers itself",
    "own tape": "OwnTape reduces its gradients over the workers itself",
}


def test_usage(results: Results) -> None:
    found = messages(results, "case_usage")
    assert set(found) == set(USAGE)
    for name, message in found.items():
        assert message.startswith("UsageError: "), (name, message)
        assert USAGE[name] in message, (name, message)
        assert "\n" not in message, name


ONE_RANK_RAISES = """
import keras, numpy as np, hvdtrain
rank = hvdtrain.init().rank
def fail(batch, logs):
    if rank == 1 and batch == 3:
        raise RuntimeError("the disk is gone")
make = lambda: keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
trainer = hvdtrain.Trainer(make, "sgd", "mse", global_batch_size=4)
callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=fail)]
trainer.fit(np.ones((80, 3)), np.ones((80, 1)), epochs=1000, callbacks=callbacks, verbose=0)
"""

ONE_RANK_STAYS_AWAY = """
import time, keras, numpy as np, hvdtrain
rank = hvdtrain.init().rank
def wait(epoch, logs):
    if rank == 1 and epoch == 1:
        time.sleep(300)
make = lambda: keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
trainer = hvdtrain.Trainer(make, "sgd", "mse", global_batch_size=4)
callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=wait)]
trainer.fit(np.ones((8, 3)), np.ones((8, 1)), epochs=3, callbacks=callbacks, verbose=0)
"""


@pytest.mark.parametrize(
    ("script", "says"),
    [
        pytest.param(
            ONE_RANK_RAISES,
            "RuntimeError: the disk is gone",
            marks=pytest.mark.slow,
            id="raises",
        ),
        pytest.param(
            ONE_RANK_STAYS_AWAY,
            "Rank 0: Horovod stopped in the middle of a collective",
            marks=pytest.mark.slow,
            id="stays away",
        ),
    ],
)
def test_the_job_ends(tmp_path: Path, script: str, says: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    job = launch([sys.executable, "-m", "hvdtrain.worker", str(path)], timeout=2 * LIMIT_SECONDS)
    assert job.returncode != 0
    assert job.seconds < LIMIT_SECONDS
    assert says in job.output
