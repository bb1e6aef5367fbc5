"""`hvdtrain estimate`: the walk through a step's graph, and what is printed for scripts of several kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from click.testing import CliRunner

from hvdtrain.cli import estimate as command
from hvdtrain.parallel.step_memory import count_operations, peak_bytes

ROWS = tf.TensorSpec([1000, 1000], tf.float32)
SIZE = 4_000_000


def peak(function: Callable[..., Any], *specs: tf.TensorSpec) -> float:
    """In sizes of ROWS."""
    return peak_bytes(tf.function(function).get_concrete_function(*specs).graph) / SIZE


def test_an_operation_on_elements_writes_into_its_input() -> None:
    assert peak(lambda x: tf.nn.relu(tf.exp(tf.matmul(x, x)) + 1.0), ROWS) == pytest.approx(
        1, abs=0.01
    )
    assert peak(lambda x: tf.nn.relu(tf.exp(x) + 1.0), ROWS) == 1, (
        "the function's input is not its own"
    )


def test_a_tensor_lives_until_its_last_consumer_has_run() -> None:
    def used_again(x: tf.Tensor) -> tf.Tensor:
        first = tf.matmul(x, x)
        return tf.matmul(tf.matmul(tf.matmul(first, x), x), first)

    assert peak(lambda x: tf.matmul(tf.matmul(tf.matmul(x, x), x), x), ROWS) == 2
    assert peak(used_again, ROWS) == 3


def test_views_have_no_memory() -> None:
    assert peak(lambda x: tf.reshape(tf.identity(tf.reshape(x, [-1])), [500, 2000]), ROWS) == 0


def test_what_a_loop_keeps_for_its_gradient() -> None:
    def loop(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(
                lambda i, _: i < 10,
                lambda i, y: (i + 1, tf.tanh(tf.matmul(y, x))),
                (tf.constant(0), x),
                maximum_iterations=10,
                parallel_iterations=1,
            )
        return tape.gradient(y, x)

    function = tf.function(loop).get_concrete_function(ROWS)
    # What tanh has made in ten rounds, and what one round needs.
    assert 10 <= peak_bytes(function.graph) / SIZE < 20, (
        "tanh's output is kept twice, in one memory"
    )
    assert count_operations(function.graph) > 2 * len(function.graph.get_operations())


MODEL = """
import keras, numpy as np, hvdtrain
print("a script may print")
rank = hvdtrain.init()
model = lambda: keras.Sequential([keras.layers.Input((100,)), keras.layers.Dense(1000), keras.layers.Dense(10)])
x = np.zeros((64, 100), "float32")
"""
WEIGHTS = 4 * (101_000 + 10_010)


def run(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(MODEL + script)
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain.cli", "estimate", *words, str(folder / "train.py")],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("divided", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_trainer(divided: bool, tmp_path: Path) -> None:
    arguments = f"'adam', 'mse', global_batch_size=5 * rank.size, shard_optimizer={divided}"
    done = run(
        tmp_path,
        f"trainer = hvdtrain.Trainer(model, {arguments})\n"
        "trainer.fit(x, x[:, :10], epochs=1)\nraise SystemExit('it has trained')\n",
        *("-np", "4", "--json"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["examples"] == 5
    memory = found["memory"]
    assert memory["weights"] == pytest.approx(WEIGHTS, rel=0.01)
    assert memory["optimizer state"] == pytest.approx(
        WEIGHTS / 2 if divided else 2 * WEIGHTS, rel=0.01
    )
    assert 0 < memory["gradients"] <= WEIGHTS
    # A message of its own, of all gradients, needs no buffer.
    assert memory["fusion buffer"] > WEIGHTS * 0.99 if divided else memory["fusion buffer"] == 0
    kinds = {"reducescatter": 0.75, "allgather": 0.75} if divided else {"allreduce": 1.5}
    for kind, factor in kinds.items():
        assert found["sent"][kind] == pytest.approx(WEIGHTS * factor, rel=0.01)


@pytest.mark.slow
def test_micro_batches_as_the_memory_allows(tmp_path: Path) -> None:
    """Tracing the step to choose their number does not count as training, nor its messages as sent before."""
    layout = "layout=hvdtrain.Layout(hvdtrain.Mesh(), micro_batches='auto')"
    done = run(
        tmp_path,
        f"trainer = hvdtrain.Trainer(model, 'sgd', 'mse', global_batch_size=20, {layout})\n"
        "trainer.fit(x, x[:, :10], epochs=1)\nraise SystemExit('it has trained')\n",
        *("-np", "4", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert "computed in one piece" in done.stderr
    assert json.loads(done.stdout)["sent"]["allreduce"] == pytest.approx(WEIGHTS * 1.5, rel=0.01)


def test_the_planned_fit_sees_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    def run(argv: list[str], *, env: dict[str, str], **_: Any) -> Any:
        seen.update(env)
        return subprocess.CompletedProcess(argv, 3)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit):
        command._run(2, 2, tmp_path / "train.py", ())
    assert seen["CUDA_VISIBLE_DEVICES"] == "-1"


def test_model_fit_is_refused_before_it_trains(tmp_path: Path) -> None:
    done = run(tmp_path, "m = model()\nm.compile('sgd', 'mse')\nm.fit(x, x[:, :10])\n", "-np", "2")
    assert done.returncode == 2
    assert "create a Trainer for the same model" in done.stderr
    assert done.stdout == ""


REPORT = {
    "examples": 5,
    "memory": {"weights": 4_000_000, "gradients": 4_000_000},
    "resident": 10_000_000,
    "sent": {"allreduce": 6_000_000},
    "messages": 4,
    "unknown_messages": 1,
}


@pytest.mark.parametrize(
    ("memory", "says"), [(80e6, "fits"), (75e6, "may not fit"), (70e6, "does not fit")]
)
def test_what_is_printed(
    memory: float, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_run", lambda *args: dict(REPORT))
    monkeypatch.setattr(command, "memory_limit", lambda: round(memory))
    (tmp_path / "train.py").touch()
    shown = CliRunner().invoke(
        command.estimate, ["-np", "8", "--ranks-per-host", "4", str(tmp_path / "train.py")]
    )
    assert shown.exit_code == 0, shown.output
    assert "sum                      8.0 MB" in shown.output
    assert f"4 on this host: 0.07 of {memory / 1e9:.2f} GB of memory: {says}\n" in shown.output
    assert "sends 6.00 MB per step by allreduce" in shown.output
    assert "1 messages per step whose size" in shown.output
