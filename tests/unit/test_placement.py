"""Layers on the devices of one process; logical CPU devices stand in for GPUs, so a process of its own runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow
SCRIPT = r'''
import json
import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.parallel.layer_placement import place

layers = keras.layers
seen = {}


class Where(layers.Layer):
    """Notes on which device it works."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        if not isinstance(x, keras.KerasTensor):
            y = x * self.scale
            seen.setdefault(self.name, set()).add(y.device[-5:])
            return y
        return x * self.scale


def make():
    block = keras.Sequential([layers.Dense(4, activation="relu", name="up"), Where(name="inner")], name="block")
    return keras.Sequential(
        [layers.Input((3,)), layers.Dense(4, name="first"), Where(name="outer"), block, layers.Dense(2, name="last")]
    )


PLAN = {"block": "CPU:1", "block/inner": "cpu:2", "outer": "/device:CPU:2"}
x = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
y = x[:, :2] * 3


def fitted(prepare, train):
    keras.utils.set_random_seed(1)
    model = prepare(make())
    train(model)
    return model


def by_keras(model):
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)


def by_trainer(model):
    trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(0.01), "mse", global_batch_size=4)
    trainer.fit(x, y, epochs=2, shuffle=False, verbose=0)


def refused(plan, model=None):
    try:
        place(model or make(), plan)
    except UsageError as error:
        return str(error)


plain = fitted(lambda model: model, by_keras)
seen.clear()
found = {}
for name, train in {"keras": by_keras, "trainer": by_trainer}.items():
    model = fitted(lambda model: place(model, PLAN), train)
    found[name] = max(float(abs(a.numpy() - b.numpy()).max()) for a, b in zip(plain.weights, model.weights))
model(x)
found["seen"] = {name: sorted(where) for name, where in seen.items()}
found["variables"] = {v.path: v.value.device[-5:] for v in model.variables}
found["slots"] = {v.path: v.value.device[-5:] for v in model.optimizer.variables}
late = place(keras.Sequential([layers.Dense(2, name="late")]), {"late": "CPU:1"})
late(x)
found["late"] = sorted({v.value.device[-5:] for v in late.variables})
found["refused"] = [
    refused({"first": "GPU:0"}), refused({"nowhere": "CPU:0"}), refused({"(": "CPU:0"}),
    refused({"first": "CPU:0", "fir.*": "CPU:1"}), refused({"first": "CPU:0"}, model),
]
print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def found() -> Any:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_model_trains_as_if_it_were_on_one_device(found: Any) -> None:
    assert found["keras"] <= 1e-6
    assert found["trainer"] <= 1e-6


def test_layers_work_where_the_plan_says(found: Any) -> None:
    assert {name: set(where) - {""} for name, where in found["seen"].items()} == {
        "outer": {"CPU:2"},
        "inner": {"CPU:2"},
    }


def test_variables_and_their_state_are_there_too(found: Any) -> None:
    where = {path.split("/")[-2]: device for path, device in found["variables"].items()}
    wanted = {"first": "CPU:0", "outer": "CPU:2", "up": "CPU:1", "inner": "CPU:2", "last": "CPU:0"}
    assert where == wanted
    slots = {p: d for p, d in found["slots"].items() if "momentum" in p or "velocity" in p}
    assert len(slots) == 16
    for path, device in slots.items():
        assert device == next(d for name, d in wanted.items() if f"_{name}_" in path), path
    assert found["late"] == ["CPU:1"]


def test_what_cannot_work_is_said(found: Any) -> None:
    device, pattern, expression, two, late = found["refused"]
    assert "this process sees CPU:0, CPU:1, CPU:2" in device
    assert "Paths: first, outer, block, block/up, block/inner, last" in pattern
    assert "not a regular expression" in expression
    assert "'first' is placed on" in two
    assert "before training" in late
