"""Gathering and scattering a state over layouts, between ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from thread_ranks import ThreadRanks, run_ranks, thread_ranks

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.shards import Shard
from hvdtrain.keras_internals.variables import shared_memory_value
from hvdtrain.parallel import gather_scatter as travel
from hvdtrain.parallel.gather_scatter import Piece, State, gather, scatter

RNG = np.random.default_rng(0)
WHOLE: State = {
    "embedding": RNG.normal(size=(6, 10)).astype("float32"),
    "up": RNG.normal(size=(4, 8)).astype(ml_dtypes.bfloat16),
    "flag": np.array([True, False, True]),
    "iterations": np.array(2**40 + 1, "int64"),
    "empty": np.zeros((0, 3), "float32"),
}
PLACES = {name: (0, number, 0) for number, name in enumerate(WHOLE)}
SPLIT = {"embedding": 0, "up": 1}


def piece(held: State, name: str, shard: Shard | None, sends: bool) -> Piece:
    """A piece of `held`, which has what the rank holds."""
    whole = WHOLE[name]

    def write(value: np.ndarray) -> None:
        held[name] = shard.part_of(value) if shard else value

    shape = shard.part_shape(whole.shape) if shard else whole.shape
    return Piece(
        place=PLACES[name],
        name=name,
        shape=whole.shape,
        dtype=whole.dtype.name,
        sends=sends,
        elements=int(np.prod(shape)),
        read=lambda: held[name],
        write=write,
        axis=shard.axis if shard else 0,
    )


def replicas(rank: int, held: State) -> list[Piece]:
    """All on every rank."""
    return [piece(held, name, None, rank == 0) for name in WHOLE]


def tensor(rank: int, held: State) -> list[Piece]:
    """Data 2 x tensor 2."""
    data, index = divmod(rank, 2)
    pieces = []
    for name in WHOLE:
        shard = Shard(SPLIT[name], index, 2) if name in SPLIT else None
        pieces.append(piece(held, name, shard, data == 0 and (shard is not None or index == 0)))
    return pieces


def hybrid(rank: int, held: State) -> list[Piece]:
    """Pipeline 2 x tensor 2: the first stage has the embedding, the second all the rest."""
    stage, index = divmod(rank, 2)
    names = ["embedding", "iterations"] if stage == 0 else [n for n in WHOLE if n != "embedding"]
    pieces = []
    for name in names:
        shard = Shard(SPLIT[name], index, 2) if name in SPLIT else None
        sends = rank == 0 if name == "iterations" else shard is not None or index == 0
        pieces.append(piece(held, name, shard, sends))
    return pieces


LAYOUTS = (replicas, tensor, hybrid)


@pytest.mark.parametrize("block", [12, 2**20])
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_a_state_goes_from_one_layout_to_another(
    source: Any, target: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(travel, "BLOCK_BYTES", block)
    everyone = thread_ranks(4)
    held: Sequence[State] = [{} for _ in range(4)]

    def there(ranks: ThreadRanks) -> State:
        pieces = source(ranks.rank(), held[ranks.rank()])
        for p in pieces:
            p.write(WHOLE[p.name])
        return gather(pieces, ranks)

    first, *others = run_ranks(everyone, there)
    assert others == [{}, {}, {}]
    assert list(first) == list(WHOLE)
    for name, value in WHOLE.items():
        assert first[name].dtype == value.dtype
        assert first[name].tobytes() == value.tobytes() and first[name].shape == value.shape, name
    now: Sequence[State] = [{} for _ in range(4)]

    def back(ranks: ThreadRanks) -> None:
        rank = ranks.rank()
        scatter(target(rank, now[rank]), first if rank == 0 else None, ranks)

    assert run_ranks(everyone, back) == [None] * 4
    for rank in range(4):
        for p in target(rank, {}):
            expected: State = {}
            piece(expected, p.name, _shard(p, rank), False).write(WHOLE[p.name])
            assert now[rank][p.name].tobytes() == expected[p.name].tobytes(), (rank, p.name)


def _shard(p: Piece, rank: int) -> Shard | None:
    is_part = p.elements < int(np.prod(p.shape))
    return Shard(p.axis, rank % 2, 2) if is_part else None


def test_a_state_that_does_not_fit_is_refused_on_all_ranks() -> None:
    wrong = WHOLE | {"up": np.zeros((4, 6))}
    held: State = {}

    def work(ranks: ThreadRanks) -> None:
        rank = ranks.rank()
        scatter(hybrid(rank, held), wrong if rank == 0 else None, ranks)

    found = run_ranks(thread_ranks(4), work)
    assert {str(error) for error in found} == {
        "variable 'up' has shape [4, 6] in the state, but shape [4, 8] here"
    }
    assert all(isinstance(error, UsageError) for error in found)
    assert held == {}


def test_what_was_gathered_into_memory_stays_as_it_was_until_that_is_taken_again() -> None:
    """A checkpoint is written from it while training goes on; replicas that do not send read nothing."""
    read: list[int] = []

    def value(rank: int) -> np.ndarray:
        read.append(rank)
        return trained

    def work(ranks: ThreadRanks) -> State:
        rank, memory = ranks.rank(), memories[ranks.rank()]
        one = piece({"up": WHOLE["up"]}, "up", None, rank == 0)
        pieces = [replace(one, read=lambda: value(rank), together=False)]
        return gather(pieces, ranks, memory=memory)

    memories: list[State] = [{}, {}]
    trained = WHOLE["up"].copy()
    first, _ = run_ranks(thread_ranks(2), work)
    trained += 1
    assert first["up"].tobytes() == WHOLE["up"].tobytes()
    second, _ = run_ranks(thread_ranks(2), work)
    assert second["up"] is first["up"] and second["up"].tobytes() == trained.tobytes()
    assert read == [0, 0] and memories[1] == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_shared_memory_value(dtype: str, shape: tuple[int, ...]) -> None:
    variable = tf.Variable(tf.cast(tf.ones(shape), dtype))
    found = shared_memory_value(variable)
    assert found.dtype == variable.dtype.as_numpy_dtype and found.shape == shape
    variable.assign(tf.cast(tf.zeros(shape), dtype))
    assert (found.astype("float32") == 1).all()
