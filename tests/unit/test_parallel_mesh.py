"""Mesh and Layout: who stands where, who talks to whom, and what cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import thread_ranks

from hvdtrain.collectives import mesh as mesh_module
from hvdtrain.collectives.mesh import Mesh, MeshCoordinates
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.shards import Shard, mark_shard
from hvdtrain.parallel.layout import Layout
from hvdtrain.rank_variables import size_of

meshes = st.builds(Mesh, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


@given(meshes)
def test_places_and_ranks_are_one_to_one(mesh: Mesh) -> None:
    places = [mesh.place(rank) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))


def test_tensor_neighbours_are_neighbouring_ranks() -> None:
    mesh = Mesh(data=2, tensor=2, pipeline=3)
    assert mesh.place(0) == MeshCoordinates(0, 0, 0)
    assert mesh.place(1) == MeshCoordinates(0, 0, 1)
    assert mesh.place(2) == MeshCoordinates(0, 1, 0)
    assert mesh.place(7) == MeshCoordinates(1, 0, 1)


def test_groups_of_a_rank() -> None:
    mesh = Mesh(data=2, tensor=2, pipeline=3)
    assert mesh.data_ranks(3) == [3, 9]
    assert mesh.tensor_ranks(3) == [2, 3]
    assert mesh.pipeline_ranks(3) == [1, 3, 5]
    assert mesh.stage_ranks(3) == [2, 3, 8, 9]


@given(meshes)
def test_each_group_divides_the_ranks(mesh: Mesh) -> None:
    """Every rank is in its own group, and two ranks' groups are the same or have nobody in common."""
    for group in (mesh.data_ranks, mesh.tensor_ranks, mesh.pipeline_ranks, mesh.stage_ranks):
        found = {rank: tuple(group(rank)) for rank in range(mesh.size)}
        assert all(rank in ranks for rank, ranks in found.items())
        assert sum(len(ranks) for ranks in set(found.values())) == mesh.size


def test_process_sets_are_each_there_once_and_of_several_ranks_but_not_all() -> None:
    lists = Mesh(tensor=2).rank_lists(4)
    assert sorted(lists) == [[0, 1], [0, 2], [1, 3], [2, 3]]


def test_data_takes_the_ranks_that_are_left() -> None:
    assert Mesh(tensor=2, pipeline=2).for_ranks(12) == Mesh(data=3, tensor=2, pipeline=2)


@pytest.mark.parametrize(
    ("mesh", "ranks", "message"),
    [
        (Mesh(tensor=4), 2, "needs at least 4 ranks, but the job has 2: start it with -np 4"),
        (Mesh(data=2, tensor=2), 2, "needs 4 ranks, but the job has 2"),
        (Mesh(data=2, tensor=2), 8, "has 4 ranks, but the job has 8"),
        (Mesh(tensor=2, pipeline=2), 6, "not a multiple of that: start it with -np 4 or 8"),
    ],
)
def test_ranks_that_make_no_mesh(mesh: Mesh, ranks: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        mesh.rank_lists(ranks)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("sizes", [{"tensor": 0}, {"data": -1}, {"pipeline": 1.5}, {"data": True}])
def test_sizes_that_are_none(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"Mesh: {next(iter(sizes))}="):
        Mesh(**sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": 4}, "expected an hvdtrain.Mesh"),
        ({"mesh": Mesh(tensor=2), "split": {"up": "diagonal"}}, "use one of column, row"),
        ({"mesh": Mesh(tensor=2), "split": {"up(": "column"}}, "is not a regular expression"),
        ({"mesh": Mesh(tensor=2)}, "split names no layer"),
        (
            {"mesh": Mesh(pipeline=2), "micro_batches": 0},
            "micro_batches=0: pass an integer, 1 or more",
        ),
        ({"mesh": Mesh(pipeline=3), "stages": ["a"]}, "pipeline=3"),
        ({"mesh": Mesh(pipeline=2), "stages": "b"}, r"stages='b': pass a list, \['b'\]"),
        ({"mesh": Mesh(tensor=2), "split": ["up"]}, "pass a dict"),
    ],
)
def test_layouts_that_cannot_be(arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Layout(**arguments)


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 1),
        ({"HOROVOD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"}, 2),
        ({"SLURM_NTASKS": "8"}, 1),
    ],
)
def test_the_job_has_as_many_ranks_as_its_launcher_says(environ: dict, size: int) -> None:
    assert size_of(environ) == size


def test_a_job_without_the_process_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "ALL_RANKS", thread_ranks(4)[0])
    monkeypatch.setattr(mesh_module, "_known_sets", lambda: {(0, 1, 2, 3): 0})
    with pytest.raises(UsageError, match=r"process set of ranks \[0, 2\].*hvdtrain.init\(mesh="):
        mesh_module.position(Mesh(tensor=2))


def test_data_alone_needs_no_process_set(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = thread_ranks(4)[2]
    monkeypatch.setattr(mesh_module, "ALL_RANKS", everyone)
    monkeypatch.setattr(mesh_module, "_known_sets", lambda: {(0, 1, 2, 3): 0})
    here = mesh_module.position(Mesh())
    assert here.data_set is here.stage_set is everyone
    assert here.tensor_set.ranks == here.pipeline_set.ranks == [2]
    assert float(here.tensor_set.allreduce(3.0, "alone")) == 3.0


def test_what_most_ranks_hold_is_compared_first() -> None:
    """Ranks that stop over their part must leave nobody waiting for what all hold."""
    ranks = thread_ranks(4)[1]
    here = mesh_module.position_in(Mesh(data=2, tensor=2), ranks, ranks.subset)
    part, whole, other = (SimpleNamespace() for _ in range(3))
    mark_shard(part, Shard(axis=0, index=1, count=2))
    found = [(group.ranks, held) for group, held in here.by_holders([part, whole, other])]
    assert found == [([0, 1, 2, 3], [whole, other]), ([1, 3], [part])]


def test_a_part_knows_where_it_belongs() -> None:
    shard = Shard(axis=1, index=2, count=3)
    assert shard.bounds(12) == (8, 12)
    assert shard.part_shape((5, 12, 2)) == (5, 4, 2)
    assert shard.whole_shape((5, 4, 2)) == (5, 12, 2)
