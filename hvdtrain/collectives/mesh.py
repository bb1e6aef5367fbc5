"""Mesh: the ranks as a grid of data x pipeline x tensor, and the groups in which they communicate.

rank = (data_index * pipeline + stage) * tensor + tensor_index: the ranks that split one layer, which communicate most,
have consecutive numbers, and so are usually on one host. The groups of rank r are:

    data       the ranks with r's stage and tensor index: they hold the same parts of the same layers
    tensor     the ranks with r's data index and stage: together they hold whole layers
    pipeline   the ranks with r's data and tensor index: the stages of one copy of the model
    stage      data x tensor: the ranks that hold the same unsplit variables

Mesh() has only the data dimension: plain data parallelism. Any other mesh must be given to Horovod when it starts, by
`hvdtrain.init(mesh=...)` or `Trainer(layout=...)`, as its groups are process sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import horovod.tensorflow as hvd
from horovod.common import process_sets

from hvdtrain.collectives.communicator import ALL_RANKS, Communicator, HorovodRanks, LoneRank
from hvdtrain.errors import UsageError, require_integer
from hvdtrain.keras_internals.shards import shard_of


@dataclass(frozen=True)
class MeshCoordinates:
    """Coordinates of a rank in the mesh, counted from 0.

    Attributes:
        data_index: Index of its copy of the model.
        stage: Index of its pipeline stage.
        tensor_index: Index of its part of the split layers.
    """

    data_index: int
    stage: int
    tensor_index: int


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks: data x pipeline x tensor.

    Args:
        data: Number of copies of the model. 0: the number of ranks divided by tensor * pipeline.
        tensor: Number of ranks over which the weights of a layer are split.
        pipeline: Number of stages into which the model is cut.

    Raises:
        UsageError: An argument is not an integer, or is too small.
    """

    data: int = 0
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name, least in (("data", 0), ("tensor", 1), ("pipeline", 1)):
            require_integer(f"Mesh: {name}", getattr(self, name), least)

    @property
    def size(self) -> int:
        """Number of ranks; 0 if `data` is 0."""
        return self.data * self.pipeline * self.tensor

    def for_ranks(self, ranks: int) -> Mesh:
        """Return the mesh with `data` filled in for a job of `ranks` ranks.

        Raises:
            UsageError: The number of ranks is not the size of the mesh or, without `data`, not a multiple of
                tensor * pipeline.
        """
        copy = self.tensor * self.pipeline
        wanted = self.size or copy
        shape = f"tensor={self.tensor}, pipeline={self.pipeline}"
        if self.data:
            shape = f"data={self.data}, {shape}"
        if ranks < wanted:
            least = "" if self.data else "at least "
            raise UsageError(
                f"Mesh({shape}) needs {least}{wanted} ranks, but the job has {ranks}: "
                f"start it with -np {wanted}, or use a smaller mesh"
            )
        if self.data and ranks != wanted:
            raise UsageError(
                f"Mesh({shape}) has {wanted} ranks, but the job has {ranks}: start it with -np "
                f"{wanted}, or leave data out of the mesh"
            )
        if ranks % copy:
            raise UsageError(
                f"Mesh({shape}): one copy of the model takes {copy} ranks, and the job's {ranks} "
                f"are not a multiple of that: start it with -np {ranks // copy * copy} or "
                f"{(ranks // copy + 1) * copy}"
            )
        return replace(self, data=ranks // copy)

    def place(self, rank: int) -> MeshCoordinates:
        """Return the coordinates of `rank`; `data` must be filled in."""
        assert 0 <= rank < self.size, (rank, self)
        copy, tensor_index = divmod(rank, self.tensor)
        data_index, stage = divmod(copy, self.pipeline)
        return MeshCoordinates(data_index, stage, tensor_index)

    def rank(self, place: MeshCoordinates) -> int:
        """Return the rank at `place`."""
        copy = place.data_index * self.pipeline + place.stage
        return copy * self.tensor + place.tensor_index

    def data_ranks(self, rank: int) -> list[int]:
        """Return the ranks that hold the same part of the model as `rank`, itself included."""
        return self._along(rank, "data_index")

    def tensor_ranks(self, rank: int) -> list[int]:
        """Return the ranks over which the layers of `rank` are split, itself included."""
        return self._along(rank, "tensor_index")

    def pipeline_ranks(self, rank: int) -> list[int]:
        """Return the ranks with `rank`'s data and tensor index, by stage."""
        return self._along(rank, "stage")

    def stage_ranks(self, rank: int) -> list[int]:
        """Return all ranks of `rank`'s stage."""
        return self._along(rank, "data_index", "tensor_index")

    def neighbour_ranks(self, rank: int) -> list[int]:
        """Return `rank` and the rank of the next stage of the same copy, if there is one."""
        first = self.place(rank).stage
        return self.pipeline_ranks(rank)[first : first + 2]

    def rank_lists(self, ranks: int) -> list[list[int]]:
        """Return the process sets that a job of `ranks` ranks needs, without groups of one rank or of all ranks.

        Raises:
            UsageError: The mesh does not fit that number of ranks; see `for_ranks`.
        """
        mesh = self.for_ranks(ranks)
        groups = (
            mesh.data_ranks,
            mesh.tensor_ranks,
            mesh.pipeline_ranks,
            mesh.stage_ranks,
            mesh.neighbour_ranks,
        )
        found = {tuple(group(rank)) for group in groups for rank in range(ranks)}
        return [list(group) for group in sorted(found) if 1 < len(group) < ranks]

    def _along(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks whose coordinates differ from those of `rank` in nothing but `axes`."""
        here = self.place(rank)
        same = {axis: getattr(here, axis) for axis in axes}
        return [other for other in range(self.size) if replace(self.place(other), **same) == here]


@dataclass(frozen=True)
class Position(MeshCoordinates):
    """Position of this rank in the mesh, and the groups in which it communicates.

    Attributes:
        mesh: The mesh, with `data` filled in.
        data_set: Ranks with the same parts of the same layers.
        tensor_set: Ranks that together hold whole layers of this stage.
        pipeline_set: Ranks of the stages of this copy of the model.
        stage_set: Ranks that hold the same unsplit variables.
        everyone: All ranks of the job.
    """

    mesh: Mesh
    data_set: Communicator
    tensor_set: Communicator
    pipeline_set: Communicator
    stage_set: Communicator
    everyone: Communicator

    @property
    def has_all(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.mesh.tensor == self.mesh.pipeline == 1

    def holders(self, variable: Any) -> Communicator:
        """Return the ranks that hold the same values of `variable` as this one."""
        return self.stage_set if shard_of(variable) is None else self.data_set

    def copies(self, variable: Any) -> int:
        """Return how many of the holders of `variable` compute the same example."""
        return self.mesh.tensor if shard_of(variable) is None else 1

    def parts(self, variable: Any) -> list[Communicator]:
        """Return the groups of ranks over which `variable` is split; [] if this rank holds all of it."""
        return [] if shard_of(variable) is None else [self.tensor_set]

    def by_holders(self, variables: Iterable[Any]) -> list[tuple[Communicator, list[Any]]]:
        """Group `variables` by the ranks that hold the same values; leave out those that only this rank holds.

        The variables of the whole stage come first: if the ranks of a smaller group then stop because their values
        differ, no other rank waits for them.
        """
        parts: list[Any] = []
        wholes: list[Any] = []
        for variable in variables:
            (wholes if shard_of(variable) is None else parts).append(variable)
        found = [(self.stage_set, wholes), (self.data_set, parts)]
        return [(ranks, held) for ranks, held in found if held and ranks.size() > 1]

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank with stage `stage`, and this rank's data and tensor index."""
        return self.mesh.rank(MeshCoordinates(self.data_index, stage, self.tensor_index))

    def pair_set(self, rank: int) -> Communicator:
        """Return the process set of this rank and its neighbour `rank` in the pipeline."""
        return _process_set(sorted((ALL_RANKS.rank(), rank)), _known_sets())


def position(mesh: Mesh) -> Position:
    """Return this rank's position in `mesh`; Horovod must be running.

    Raises:
        UsageError: The mesh does not fit the number of ranks, or Horovod was started without its process sets.
    """
    known = _known_sets()
    return position_in(mesh, ALL_RANKS, lambda ranks: _process_set(ranks, known))


def position_in(
    mesh: Mesh, everyone: Communicator, set_of: Callable[[list[int]], Communicator]
) -> Position:
    """Return this rank's position in `mesh`.

    Args:
        mesh: The mesh.
        everyone: All ranks of the job.
        set_of: Returns the communicator of a list of ranks.

    Raises:
        UsageError: The mesh does not fit the number of ranks.
    """
    mesh = mesh.for_ranks(everyone.size())
    rank = everyone.rank()
    return Position(
        **vars(mesh.place(rank)),
        mesh=mesh,
        data_set=set_of(mesh.data_ranks(rank)),
        tensor_set=set_of(mesh.tensor_ranks(rank)),
        pipeline_set=set_of(mesh.pipeline_ranks(rank)),
        stage_set=set_of(mesh.stage_ranks(rank)),
        everyone=everyone,
    )


def _known_sets() -> dict[tuple[int, ...], int]:
    """Return Horovod's ID of each process set, by its ranks."""
    return {
        tuple(ranks): number
        for number, ranks in process_sets._basics._get_process_set_ids_and_ranks().items()
    }


def _process_set(ranks: list[int], known: Mapping[tuple[int, ...], int]) -> Communicator:
    number = known.get(tuple(ranks))
    if number is None and len(ranks) == 1:
        return LoneRank(ranks[0])
    if number is None:
        raise UsageError(
            f"Horovod was started without the mesh's process set of ranks {ranks}: pass the mesh "
            "to the call that starts Horovod, hvdtrain.init(mesh=...), or let Trainer(layout=...) "
            "start it"
        )
    if number == 0:
        return ALL_RANKS
    found = hvd.ProcessSet(ranks)
    found.process_set_id = number
    return HorovodRanks(found)
