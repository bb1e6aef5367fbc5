"""SplitRunner: a model whose layers are split over ranks, on a mesh of data x tensor.

The ranks of a tensor set compute the same examples: they read the same share, draw the same dropout masks and hold the
same unsplit variables. `Trainer.model` is the model with split layers; its outputs are whole.
"""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.collectives.mesh import Position
from hvdtrain.parallel.layout import Layout
from hvdtrain.parallel.tensor.convert import convert
from hvdtrain.parallel.whole_model import make_part, require_whole_optimizer
from hvdtrain.strategies.runner import Runner
from hvdtrain.strategies.strategy import ModelSource


class SplitRunner(Runner):
    """Runner on a rank that holds its parts of the layers that the layout names, and all other layers whole.

    Args:
        layout: Mesh, and the layers to split.
        position: Position of this rank in the mesh.
    """

    def __init__(self, layout: Layout, position: Position) -> None:
        super().__init__(position)
        self._layout = layout

    def build(self, model: ModelSource) -> keras.Model:
        converted = convert(model, self._layout.split, self.position)
        if self.position.mesh.tensor > 1:
            make_part(converted, converted)
        return converted

    def build_variables(self, model: keras.Model, data: Any, what: str) -> None:
        require_whole_optimizer(model)
        super().build_variables(model, data, what)
