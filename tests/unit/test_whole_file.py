"""What each layout holds of a model and its optimizer, saved and loaded: ranks are threads, nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from thread_ranks import ThreadRanks, run_ranks, thread_ranks

from hvdtrain.collectives.mesh import Mesh, position_in
from hvdtrain.keras_internals.shards import shard_of
from hvdtrain.parallel.gather_scatter import State, local_state
from hvdtrain.parallel.layout import Layout
from hvdtrain.parallel.state_layout import pieces_of
from hvdtrain.runtime import init
from hvdtrain.strategies.horovod import HorovodStrategy
from hvdtrain.trainer.strategy_choice import make_strategy

pytestmark = pytest.mark.slow
RANKS = 4


def model() -> keras.Model:
    """The embedding is large enough to wait for its values; one layer is frozen, one has a seed."""
    words = layers.Input((6,), dtype="int32")
    x = layers.Embedding(18, 64, name="embedding")(words)
    x = layers.Add(name="attended")([x, layers.MultiHeadAttention(2, 8, name="attention")(x, x)])
    z = layers.Dense(32, activation="relu", name="up")(layers.LayerNormalization(name="norm")(x))
    z = layers.Dropout(0.1, name="dropout")(z)
    x = layers.Add(name="sum")([x, layers.Dense(64, name="down")(z)])
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    x = layers.Dense(16, name="frozen", trainable=False)(x)
    x = layers.BatchNormalization(name="statistics")(x)
    return keras.Model(words, layers.Dense(5, name="out")(x), name="words")


SPLIT = {"attention": "heads", "up": "column", "down": "row"}
LAYOUTS = {
    "tensor": Layout(Mesh(tensor=2), split=SPLIT | {"embedding": "vocabulary"}),
    "tensor-4": Layout(Mesh(tensor=4), split={"up": "column", "embedding": "column"}),
    "pipeline": Layout(Mesh(pipeline=2), stages=["sum"]),
    "hybrid": Layout(Mesh(tensor=2, pipeline=2), split=SPLIT, stages=["sum"]),
}


def compiled(made: keras.Model, optimizer: Any) -> keras.Model:
    made.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


def rank_of(
    name: str, ranks: ThreadRanks, sharded: bool = False, passes: int | None = None
) -> tuple[HorovodStrategy, keras.Model]:
    """A rank's strategy, and its compiled part of the model.

    Args:
        sharded: the optimizer's state is divided over the ranks that hold the same variable, too.
        passes: of gradient accumulation.
    """
    layout = LAYOUTS[name]
    strategy = make_strategy("horovod", layout, sharded)
    assert isinstance(strategy, HorovodStrategy)
    strategy.set_position(position_in(layout.mesh, ranks, ranks.subset))
    keras.utils.set_random_seed(3)
    made = strategy.build(model)
    optimizer = keras.optimizers.Adam(0.25, name="adam", gradient_accumulation_steps=passes)
    compiled(made, strategy.distribute(optimizer))
    strategy.build_optimizer(made)
    return strategy, made


def plain(seed: int, passes: int | None = None) -> keras.Model:
    """The same in plain Keras, with an optimizer's state of random numbers."""
    keras.utils.set_random_seed(seed)
    optimizer = keras.optimizers.Adam(0.5, name="adam", gradient_accumulation_steps=passes)
    made = compiled(model(), optimizer)
    made.optimizer.build(made.trainable_variables)
    rng = np.random.default_rng(seed)
    for variable in [*made.variables[-4:], *made.optimizer.variables[2:]]:
        variable.assign(rng.normal(size=variable.shape))
    made.optimizer.variables[0].assign(11)
    return made


def state_of(made: keras.Model) -> State:
    """Without seeds, which are in no file; under the names that Keras gives."""
    found = local_state(pieces_of(made.variables, made.optimizer))
    return {name: v for name, v in found.items() if "seed_generator" not in name}


def _complaints(results: list[Any]) -> list[str]:
    return [repr(error) for error in results if error is not None]


@pytest.fixture(autouse=True)
def rank() -> None:
    init(0)


@pytest.mark.parametrize("name", ["tensor", "pipeline", "hybrid"])
def test_a_layout_holds_the_plain_model_and_saves_it(name: str, tmp_path: Path) -> None:
    job = thread_ranks(RANKS)
    everyone = [rank_of(name, ranks) for ranks in job]
    # Data is for the whole model, also where a later stage takes something else.
    inputs = [[tuple(t.shape) for t in rank.inputs(made)] for rank, made in everyone]
    assert inputs == [[(None, 6)]] * RANKS
    keras.utils.set_random_seed(3)
    expected = [v.numpy() for v in model().weights]

    def save(ranks: ThreadRanks) -> None:
        strategy, made = everyone[ranks.rank()]
        strategy.save(made, tmp_path / "model.keras")

    assert _complaints(run_ranks(job, save)) == []
    assert [p.name for p in tmp_path.iterdir()] == ["model.keras"]
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert all((a.numpy() == b).all() for a, b in zip(loaded.weights, expected, strict=True))
    assert float(loaded.optimizer.learning_rate) == 0.25
    assert loaded.get_compile_config()["metrics"] == ["accuracy"]


@pytest.mark.parametrize(
    ("name", "sharded", "passes"),
    [
        ("tensor", False, 2),
        ("tensor", True, None),
        ("tensor-4", False, None),
        ("pipeline", True, 2),
        ("hybrid", True, None),
    ],
)
def test_a_layout_loads_a_plain_file_and_gives_it_back(
    name: str,
    sharded: bool,
    passes: int | None,
    tmp_path: Path,
) -> None:
    source = plain(5, passes)
    source.save(tmp_path / "plain.keras")
    job = thread_ranks(RANKS)
    everyone = [rank_of(name, ranks, sharded, passes) for ranks in job]

    def load_and_save(ranks: ThreadRanks) -> None:
        strategy, made = everyone[ranks.rank()]
        strategy.load(made, tmp_path / "plain.keras")
        strategy.save(made, tmp_path / "again.keras")

    assert _complaints(run_ranks(job, load_and_save)) == []
    again = keras.saving.load_model(tmp_path / "again.keras")
    before, after = state_of(source), state_of(again)
    assert list(before) == list(after)
    assert all((before[key] == after[key]).all() for key in before)
    # Every rank, not only those that sent: its parts are of the whole.
    whole = {v.path: v.numpy() for v in source.weights}
    for _, made in everyone:
        for variable in made.weights:
            shard = shard_of(variable)
            value = whole[variable.path]
            assert (variable.numpy() == (shard.part_of(value) if shard else value)).all()
        assert int(made.optimizer.variables[0]) == 11
        assert float(made.optimizer.learning_rate) == 0.5
