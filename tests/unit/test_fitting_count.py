"""micro_batches="auto": how many micro-batches the memory of a rank asks for."""

from __future__ import annotations

from pathlib import Path

import keras
import psutil
import pytest
import tensorflow as tf
from fake_programs import path_with

import hvdtrain
from hvdtrain.errors import EngineError, UsageError
from hvdtrain.host_limits import memory_limit
from hvdtrain.keras_internals.variables import bytes_of
from hvdtrain.parallel.pipeline import fitting_count
from hvdtrain.parallel.pipeline.fitting_count import (
    FUSION,
    GPU_RESERVE,
    fusion_limit,
    room_for_step,
)
from hvdtrain.parallel.pipeline.stage_steps import PipelineSteps

EXAMPLES, WIDTH = 2048, 100


def steps_of(micro_batches: int | str = "auto") -> PipelineSteps:
    """Steps for shares of 2048 examples of a network whose hidden layers take 0.8 MB each with all of them."""
    hidden = [keras.layers.Dense(WIDTH, "tanh") for _ in range(3)]
    trainer = hvdtrain.Trainer(
        keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(1)]),
        "adam",
        "mse",
        global_batch_size=EXAMPLES,
        layout=hvdtrain.Layout(hvdtrain.Mesh(), micro_batches=micro_batches),
    )
    x = keras.random.uniform((EXAMPLES, WIDTH))
    trainer.fit(x.numpy(), x.numpy()[:, :1], verbose=0)
    assert isinstance(trainer.steps, PipelineSteps)
    return trainer.steps


@pytest.mark.slow
def test_less_memory_makes_smaller_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = EXAMPLES * WIDTH * 4
    counts = []
    for room in (10**9, 8 * layer, 6 * layer):
        monkeypatch.setattr(fitting_count, "room_for_step", lambda model, room=room: room)
        counts.append(steps_of().count)
    # Each of the 3 hidden layers keeps its output, and the input is read three times ahead.
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] >= 4
    assert all(count & (count - 1) == 0 for count in counts)
    monkeypatch.setattr(fitting_count, "room_for_step", lambda model: layer)
    with pytest.raises(UsageError, match=r"Rank 0: micro_batches=\"auto\": a step is estimated to"):
        steps_of()


def test_a_number_is_taken_as_it_is() -> None:
    assert steps_of(3).count == 3


def test_a_pipeline_needs_a_number() -> None:
    with pytest.raises(UsageError, match=r"auto.* does not work with pipeline=2"):
        hvdtrain.Layout(hvdtrain.Mesh(pipeline=2), micro_batches="auto")


def compiled() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_a_rank_has_its_part_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "4")
    program = psutil.Process().memory_info().rss
    # Between the two readings this process may grow.
    assert room_for_step(compiled()) == pytest.approx(memory_limit() / 4 - program, abs=50e6)


def test_the_smallest_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["/device:GPU:0"])
    model = compiled()
    for script, found in (("echo 81559; echo 40960", 40960), ("exit 9", None)):
        environ = path_with(tmp_path, {"nvidia-smi": script})
        monkeypatch.setenv("PATH", environ["PATH"])
        if found:
            state = bytes_of([*model.variables, *model.optimizer.variables])
            assert room_for_step(model) == found * 2**20 - GPU_RESERVE - state
            continue
        with pytest.raises(EngineError, match="nvidia-smi, which failed"):
            room_for_step(model)


def test_the_fusion_buffer_is_as_large_as_horovod_makes_it() -> None:
    assert fusion_limit({}) == FUSION
    assert fusion_limit({"HOROVOD_FUSION_THRESHOLD": "1024"}) == 1024
    assert fusion_limit({"HOROVOD_FUSION_THRESHOLD": "much"}) == FUSION
