"""Layout: the mesh of ranks, the layers that are split, the layers at which stages begin, and micro-batches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.collectives.mesh import Mesh
from hvdtrain.errors import UsageError, require_integer

WAYS = ("column", "row", "heads", "vocabulary")
"""Ways to split a layer's weights; see hvdtrain.parallel.tensor."""
AUTO = "auto"
"""As a number of micro-batches: as few as fit into memory."""


@dataclass(frozen=True)
class Layout:
    """How a model is divided over the ranks of a job, and their shares of the batch into micro-batches.

    Attributes:
        mesh: Mesh of ranks.
        split: Mapping from regular expressions to the ways in which matching layers are split, for mesh.tensor > 1:
            "column" or "row" (Dense), "heads" (attention), "vocabulary" or "column" (Embedding). An expression, such
            as "block_.*/mlp/up", must match the whole path of a layer: the names of the layers that contain it, then
            its own.
        stages: Names of the layers, or regular expressions for them, at which the second and later stages begin, for
            mesh.pipeline > 1. None: stages of about equal cost.
        micro_batches: Number of parts into which a rank's share of the batch is cut. They are computed one after
            another and make one step, so that only the activations of as many as there are stages are in memory at
            once; of all of them if the loss is divided by a mask or by sample weights. "auto", without pipeline stages:
            as few as fit into the memory of the ranks, by an estimate before the first step.

    Raises:
        UsageError: An attribute has the wrong type or value, or does not fit the mesh.
    """

    mesh: Mesh
    split: Mapping[str, str] = field(default_factory=dict)
    stages: Sequence[str] | None = None
    micro_batches: int | Literal["auto"] = 1

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
        if self.micro_batches != AUTO:
            require_integer("Layout: micro_batches", self.micro_batches)
        elif self.mesh.pipeline > 1:
            raise UsageError(
                f'Layout: micro_batches="auto" does not work with pipeline={self.mesh.pipeline}, whose stages differ: '
                "pass a number, such as 4 times that of the stages"
            )
        if isinstance(self.stages, str):
            raise UsageError(f"Layout: stages={self.stages!r}: pass a list, [{self.stages!r}]")
        if self.stages is not None and len(self.stages) != self.mesh.pipeline - 1:
            raise UsageError(
                f"Layout: stages names {len(self.stages)} layers, but pipeline={self.mesh.pipeline} needs "
                f"{self.mesh.pipeline - 1}: the first layer of every stage after the first"
            )


def as_layout(given: Layout | Mesh) -> Layout:
    """Return a user's `layout` argument, a Layout or only a Mesh, as a Layout; raise UsageError for other types."""
    layout = Layout(given) if isinstance(given, Mesh) else given
    if not isinstance(layout, Layout):
        raise UsageError(
            f"layout: expected an hvdtrain.Layout or Mesh, not {type(layout).__name__}"
        )
    return layout
