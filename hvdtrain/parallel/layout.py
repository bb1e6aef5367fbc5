"""Layout: which mesh of ranks, which layers are split how, and which layers are on which stage."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdtrain.collectives.mesh import Mesh
from hvdtrain.errors import UsageError, require_integer

WAYS = ("column", "row", "heads", "vocabulary")
"""How a layer's weights are split; see hvdtrain.parallel.tensor."""


@dataclass(frozen=True)
class Layout:
    """How a model is divided over the ranks of a job.

    Args:
        mesh: the ranks.
        split: for mesh.tensor > 1: maps regular expressions to the ways in which matching layers are split: "column" or
            "row" (Dense), "heads" (attention), "vocabulary" or "column" (Embedding). An expression, such as
            "block_.*/mlp/up", must match the whole path of a layer: the names of the layers that contain it, then its
            own.
        stages: for mesh.pipeline > 1: names of the layers at which the second and later stages begin. None: balanced
            by cost.
        micro_batches: for mesh.pipeline > 1: number of parts into which a rank's share of the batch is cut, to pass
            through the stages one after another. If the loss is divided by a mask or by sample weights, all of them
            are in memory at once; otherwise at most as many as there are stages.
    """

    mesh: Mesh
    split: Mapping[str, str] = field(default_factory=dict)
    stages: Sequence[str] | None = None
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise UsageError(f"Layout: mesh={self.mesh!r}: expected an hvdtrain.Mesh")
        self._check_split()
        self._check_stages()

    def _check_split(self) -> None:
        if not isinstance(self.split, Mapping):
            raise UsageError(
                f"Layout: split={self.split!r}: pass a dict from layers to ways to split"
            )
        for pattern, way in self.split.items():
            if way not in WAYS:
                raise UsageError(
                    f"Layout: split[{pattern!r}] = {way!r}: use one of {', '.join(WAYS)}"
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(
                    f"Layout: split[{pattern!r}] is not a regular expression: {error}"
                ) from None
        if self.mesh.tensor > 1 and not self.split:
            raise UsageError(
                f"Layout: mesh has tensor={self.mesh.tensor}, and split names no layer: name some, such as "
                'split={"block_.*/mlp/up": "column", "block_.*/mlp/down": "row"}'
            )

    def _check_stages(self) -> None:
        require_integer("Layout: micro_batches", self.micro_batches)
        if isinstance(self.stages, str):
            raise UsageError(f"Layout: stages={self.stages!r}: pass a list, [{self.stages!r}]")
        if self.stages is not None and len(self.stages) != self.mesh.pipeline - 1:
            raise UsageError(
                f"Layout: stages names {len(self.stages)} layers; mesh has pipeline={self.mesh.pipeline}, so name "
                f"the first layer of each stage but the first: {self.mesh.pipeline - 1}"
            )


def as_layout(given: Layout | Mesh) -> Layout:
    """Return what a user gives as a layout, or a mesh alone; UsageError for anything else."""
    layout = Layout(given) if isinstance(given, Mesh) else given
    if not isinstance(layout, Layout):
        raise UsageError(
            f"layout: expected an hvdtrain.Layout or Mesh, not {type(layout).__name__}"
        )
    return layout
