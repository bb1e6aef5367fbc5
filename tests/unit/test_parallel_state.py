"""State and files without ranks: what makes up a variable, what fits, what is written and read."""

from __future__ import annotations

import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from keras import layers
from keras.src.saving import saving_lib
from thread_ranks import thread_ranks

from hvdtrain.collectives.mesh import Mesh
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.errors import EngineError, UsageError
from hvdtrain.keras.optimizer import DistributedOptimizer
from hvdtrain.keras_internals.copies import plain_optimizer
from hvdtrain.keras_internals.shards import Shard, mark_shard
from hvdtrain.parallel.gather_scatter import (
    Entry,
    keep_state,
    local_state,
    merged,
    misfit,
    whole_of,
)
from hvdtrain.parallel.layout import Layout
from hvdtrain.parallel.pipeline.stage_runner import StageRunner
from hvdtrain.parallel.state_layout import COMMON, SLOTS, WEIGHTS, Sender, pieces_of
from hvdtrain.parallel.tensor.convert import SplitRunner
from hvdtrain.parallel.whole_file import DividedState
from hvdtrain.parallel.whole_model import Unsplit, make_part
from hvdtrain.parallel.zero.sharded_optimizer import shard
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.strategies.model_file import read_model, write_model
from hvdtrain.strategies.strategy import Strategy


def model(units: int = 4, optimizer: Any = "adam") -> keras.Model:
    made = keras.Sequential(
        [layers.Input((3,)), layers.Dense(units, name="up"), layers.Dense(2, name="out")]
    )
    made.compile(optimizer, "mse")
    return made


def trained(units: int = 4, optimizer: Any = "adam") -> keras.Model:
    """As if it had made two steps."""
    made = model(units, optimizer)
    made.optimizer.build(made.trainable_variables)
    rng = np.random.default_rng(0)
    for variable in [*made.variables, *made.optimizer.variables[2:]]:
        variable.assign(rng.normal(size=variable.shape))
    made.optimizer.iterations.assign(2)
    return made


def fact(place: tuple[int, int, int], shape: list[int], elements: int, **other: Any) -> list[Any]:
    return [list(place), other.get("name", "a"), shape, "float32", other.get("axis", 0), elements]


# What makes up the state.


def test_parts_of_ranks_make_up_a_variable() -> None:
    everyone = [[fact((0, 1, 0), [4, 6], 12, axis=1)], [], [fact((0, 1, 0), [4, 6], 12, axis=1)]]
    (entry,) = merged(everyone)
    assert entry.senders == ((0, 12), (2, 12))
    whole = np.arange(24.0).reshape(4, 6)
    left, right = whole[:, :3], np.moveaxis(whole[:, 3:], 1, 0).reshape(-1)
    assert (whole_of([left, right], entry) == whole).all()


def test_variables_come_in_the_order_of_their_places_each_name_once() -> None:
    one = fact((SLOTS, 0, 0), [2], 2, name="m")
    two = fact((WEIGHTS, 1, 0), [2], 2, name="w")
    three = fact((WEIGHTS, 0, 0), [2], 2, name="w")
    entries = merged([[one], [two, three]])
    assert [(e.name, e.place) for e in entries] == [
        ("w", (WEIGHTS, 0, 0)),
        ("w#2", (WEIGHTS, 1, 0)),
        ("m", (SLOTS, 0, 0)),
    ]


@pytest.mark.parametrize(
    "other", [fact((0, 1, 0), [4, 6], 11, axis=1), fact((0, 1, 0), [4, 5], 12, axis=1)]
)
def test_parts_that_make_up_nothing(other: list[Any]) -> None:
    with pytest.raises(EngineError, match="'a'"):
        merged([[fact((0, 1, 0), [4, 6], 12, axis=1)], [other]])


def test_a_state_that_does_not_fit() -> None:
    entries = [Entry((0, 0, 0), "a", (2, 3), "float32", 0, ((0, 6),))]
    assert misfit(entries, {"a": np.zeros((2, 3))}) is None
    found = misfit(entries, {"a": np.zeros((3, 2))})
    assert found == "variable 'a' has shape [3, 2] in the state, but shape [2, 3] here"
    assert "no variable 'a', which has shape [2, 3]" in str(misfit(entries, {}))
    more = misfit(entries, {"a": np.zeros((2, 3)), "b": np.zeros(5)})
    assert "'b' of shape [5]" in str(more)


# What a rank holds.


def test_the_state_of_a_process_is_in_plain_names_and_comes_back() -> None:
    source, target = trained(), model()
    target.optimizer.build(target.trainable_variables)
    state = local_state(pieces_of(source.variables, source.optimizer))
    paths = [v.path for v in [*source.variables, *source.optimizer.variables]]
    # Keras numbers the optimizers of a process: adam_1.
    name = source.optimizer.name
    assert list(state) == [re.sub(f"^{name}/", "optimizer/", path) for path in paths]
    assert "optimizer/learning_rate" in state
    keep_state(pieces_of(target.variables, target.optimizer), dict(state))
    for ours, theirs in zip(
        [*target.variables, *target.optimizer.variables], state.values(), strict=True
    ):
        assert (ours.numpy() == theirs).all()
    assert int(target.optimizer.iterations) == 2


def test_a_shard_is_a_part_of_the_whole_with_its_slots() -> None:
    made = model()
    kernel = made.layers[0].kernel
    mark_shard(kernel, Shard(1, 1, 2))
    made.optimizer.build(made.trainable_variables)
    sender = Sender(whole=False, shards=True, common=False)
    pieces = pieces_of(made.variables, made.optimizer, sender)
    sent = [p for p in pieces if p.sends]
    assert [p.place for p in sent] == [(WEIGHTS, 0, 0), (SLOTS, 0, 0), (SLOTS, 0, 1)]
    assert {(p.shape, p.axis, p.elements) for p in sent} == {((3, 8), 1, 12)}
    sent[0].write(np.arange(24.0).reshape(3, 8))
    assert (kernel.numpy()[0] == [4, 5, 6, 7]).all()
    assert [p.place for p in pieces if p.place[0] == COMMON] == [(COMMON, 0, 0), (COMMON, 1, 0)]


def test_state_of_another_shape_than_the_split_variable_is_refused() -> None:
    made = model(optimizer=keras.optimizers.Adafactor())
    mark_shard(made.layers[0].kernel, Shard(1, 1, 2))
    made.optimizer.build(made.trainable_variables)
    with pytest.raises(
        UsageError, match=r"Adafactor keeps state of shape .* 'sequential.*up/kernel'"
    ):
        pieces_of(made.variables, made.optimizer)


# Files.


def test_a_file_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained()
    path = tmp_path / "new" / "model.keras"
    write_model(made, path)
    before = path.read_bytes()

    def torn(self: Any, target: str) -> None:
        Path(target).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(saving_lib, "save_model", torn)
    with pytest.raises(UsageError, match=r"model\.keras cannot be written: No space"):
        write_model(made, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_reading_gives_weights_and_optimizer(tmp_path: Path) -> None:
    source, target = trained(), model()
    source.save(tmp_path / "a.keras")
    Strategy().load(target, tmp_path / "a.keras")
    for ours, theirs in zip(target.variables, source.variables, strict=True):
        assert (ours.numpy() == theirs.numpy()).all()
    for ours, theirs in zip(target.optimizer.variables, source.optimizer.variables, strict=True):
        assert (ours.numpy() == theirs.numpy()).all()


def test_reading_the_state_inside_loss_scaling(tmp_path: Path) -> None:
    """Keras writes it twice: among the outer optimizer's variables, and by itself."""
    source = trained(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    target = trained(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    target.optimizer.iterations.assign(7)
    source.save(tmp_path / "a.keras")
    assert read_model(target, tmp_path / "a.keras")
    for ours, theirs in zip(target.optimizer.variables, source.optimizer.variables, strict=True):
        assert (ours.numpy() == theirs.numpy()).all()


def test_a_file_that_was_not_trained_leaves_the_optimizer(tmp_path: Path) -> None:
    model().save(tmp_path / "a.keras")
    target = trained()
    assert read_model(target, tmp_path / "a.keras") is False
    assert int(target.optimizer.iterations) == 2


def _another_layer() -> keras.Model:
    made = keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dense(2), layers.Dense(2)])
    made.compile("adam", "mse")
    return made


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            lambda: trained(5),
            r"'up/kernel' has shape \[3, 5\] in the file and \[3, 4\]",
        ),
        (_another_layer, r"it has a variable 'layers/dense_2/vars/\d' of shape"),
        (
            lambda: trained(optimizer="sgd"),
            "holds the state of SGD in 2 variables, and Adam has 10",
        ),
        (lambda: trained(optimizer="nadam"), "holds the state of Nadam"),
        (lambda: trained(optimizer="adamw"), "holds the state of AdamW in 10"),
    ],
)
def test_a_file_of_another_model(
    tmp_path: Path, other: Callable[[], keras.Model], words: str
) -> None:
    other().save(tmp_path / "a.keras")
    target = trained()
    before = [v.numpy() for v in [*target.variables, *target.optimizer.variables]]
    with pytest.raises(UsageError, match=words.replace("'up", "'.*up")) as raised:
        read_model(target, tmp_path / "a.keras")
    assert str(raised.value).count("a.keras") == 1
    after = [v.numpy() for v in [*target.variables, *target.optimizer.variables]]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


def test_a_file_cannot_run_anything(tmp_path: Path) -> None:
    """Its configuration is not made into objects, whatever it names."""
    trained().save(tmp_path / "a.keras")
    with zipfile.ZipFile(tmp_path / "a.keras") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(parts["config.json"])
    config["module"], config["class_name"] = "os", "system"
    parts["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(tmp_path / "b.keras", "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    target = model()
    Strategy().load(target, tmp_path / "b.keras")
    assert int(target.optimizer.iterations) == 2


def test_an_unbuilt_model_cannot_be_loaded(tmp_path: Path) -> None:
    unbuilt = keras.Sequential([layers.Dense(2)])
    unbuilt.compile("adam", "mse")
    with pytest.raises(UsageError, match=r"keras\.Input"):
        Strategy().load(unbuilt, tmp_path / "a.keras")


# The model before it was divided.


class Opaque(layers.Layer):
    """Its constructor takes what no configuration holds."""

    def __init__(self, function: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


def test_the_copy_has_the_names_of_the_model_and_no_values() -> None:
    made = keras.Sequential([layers.Input((40,)), layers.Dense(50), layers.Dense(3)])
    made.compile(keras.optimizers.Adam(0.3), "mse")
    made.optimizer.build(made.trainable_variables)
    DistributedOptimizer(made.optimizer)
    random.seed(4)
    unsplit = Unsplit(made)
    assert random.random() == random.Random(4).random()
    with unsplit.whole(made) as whole:
        assert [v.path for v in whole.variables] == [v.path for v in made.variables]
        names = [v.path for v in whole.optimizer.variables]
        assert names == [v.path for v in made.optimizer.variables]
        assert not hasattr(whole.optimizer, "hvdtrain_reducer")
        assert float(whole.optimizer.learning_rate) == pytest.approx(0.3)
        large = whole.variables[0]
        assert float(abs(large.numpy()).max()) == 0
    assert large._value is None


def test_a_model_that_cannot_be_made_again_is_refused_at_once() -> None:
    x = layers.Input((3,))
    made = keras.Model(x, Opaque(abs)(layers.Dense(2)(x)))
    with pytest.raises(UsageError, match="cannot be recreated from its configuration"):
        Unsplit(made)


class OwnSGD(keras.optimizers.SGD):
    """Not registered with Keras."""


def test_a_plain_optimizer_of_the_users_own_class() -> None:
    plain = plain_optimizer(DistributedOptimizer(OwnSGD(0.2)))
    assert type(plain) is OwnSGD
    assert float(plain.learning_rate) == pytest.approx(0.2)


class Forgetful(keras.optimizers.SGD):
    """Its configuration lacks an argument."""

    hvdtrain_elementwise = True

    def __init__(self, scale: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = scale


def test_an_optimizer_that_cannot_be_made_again_is_refused_before_training() -> None:
    wanted = "(?s)optimizer Forgetful cannot be recreated .* get_config .* 'scale'"
    mesh = Mesh(1, tensor=2, pipeline=2)
    here: Any = SimpleNamespace(mesh=mesh, stage=0, tensor_set=thread_ranks(2)[0])
    layout = Layout(mesh, {"up": "column"}, ["out"])
    for runner in (StageRunner(layout, here), SplitRunner(layout, here)):
        made = runner.build(model(optimizer=Forgetful(2.0)))
        with pytest.raises(UsageError, match=wanted):
            runner.build_variables(made, None, "training")
    with pytest.raises(UsageError, match=wanted):
        shard(Forgetful(2.0), Reduction(process_set=thread_ranks(2)[0]))


def test_a_plain_optimizer_inside_loss_scaling() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    DistributedOptimizer(scaled)
    plain = plain_optimizer(scaled)
    assert type(plain.inner_optimizer) is keras.optimizers.SGD
    assert plain.inner_optimizer.momentum == 0.9
    assert "hvdtrain_reducer" not in vars(plain.inner_optimizer)


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and arrays of a .keras file."""
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
        with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
            arrays: dict[str, Any] = {}
            file.visititems(
                lambda name, item: arrays.update({name: item[()]} if hasattr(item, "shape") else {})
            )
    return _without_addresses(config), arrays


def _without_addresses(config: Any) -> Any:
    """Keras marks objects that are shared, such as a dtype policy, by their address in memory."""
    if isinstance(config, dict):
        kept = {k: v for k, v in config.items() if k != "shared_object_id"}
        return {k: _without_addresses(v) for k, v in kept.items()}
    return [_without_addresses(v) for v in config] if isinstance(config, list) else config


@pytest.mark.parametrize("kind", ["sequential", "functional"])
def test_a_divided_strategy_writes_what_plain_keras_writes(tmp_path: Path, kind: str) -> None:
    made = trained()
    if kind == "functional":
        words = layers.Input((6,), dtype="int32")
        x = layers.Embedding(40, 32)(words)
        x = layers.Dropout(0.1)(layers.MultiHeadAttention(2, 4)(x, x))
        made = keras.Model(words, layers.Dense(2)(layers.BatchNormalization()(x)))
        made.compile(keras.optimizers.AdamW(0.1), "mse", metrics=["mae"], loss_weights=0.5)
        made.optimizer.build(made.trainable_variables)
        made.optimizer.iterations.assign(7)
    made.save(tmp_path / "plain.keras")
    strategy = HorovodStrategy(state=DividedState)
    strategy.start(0)
    make_part(made, made)
    strategy.distribute(made.optimizer)
    strategy.save(made, tmp_path / "ours.keras")
    config, arrays = contents(tmp_path / "ours.keras")
    plain_config, plain_arrays = contents(tmp_path / "plain.keras")
    assert config == plain_config
    assert list(arrays) == list(plain_arrays)
    assert all((arrays[name] == plain_arrays[name]).all() for name in arrays)
    before = [v.numpy() for v in [*made.variables, *made.optimizer.variables]]
    for variable in [*made.trainable_variables, *made.optimizer.variables]:
        variable.assign(variable + keras.ops.ones_like(variable))
    strategy.load(made, tmp_path / "ours.keras")
    after = [v.numpy() for v in [*made.variables, *made.optimizer.variables]]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    with pytest.raises(UsageError, match="only a part"):
        made.save(tmp_path / "part.keras")
