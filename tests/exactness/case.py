"""A case of the table: a training, written down as the Keras expressions that a script would have.

Everything is text, so that a case travels to the ranks as JSON, and the table shows what a reader would write himself.
The words beside Keras's own are those of words.py, own_layers.py and own_steps.py; data.py has the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

BATCH = 8
IDLE, UNEVEN, EVEN = 25, 27, 24
"""Examples: 3 full batches and one of a single example, where all ranks but one are idle; or of three; or none."""


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        group: the section of the table.
        name: its row, unique in the group.
        layers: from inputs to outputs.
        model: what makes a model of them: a word of words.MODELS, or a class of own_steps.py.
        x, y, weights: what data.py calls them; weights "": none.
        source: how the data is given (data.py).
        examples, batch: of the training data, and of a global batch of it.
        loss, optimizer, metrics: as in compile; "": none.
        compiled: more arguments of compile.
        fit: more arguments of fit.
        policy: Keras's dtype policy.
        answers: evaluate and predict, too.
    """

    group: str
    name: str
    layers: tuple[str, ...] = ("Dense(4, 'tanh')", "Dense(2)")
    model: str = "functional"
    x: str = "vectors"
    y: str = "numbers"
    weights: str = ""
    source: str = "arrays"
    examples: int = IDLE
    batch: int = BATCH
    loss: str = "'mse'"
    optimizer: str = "SGD(0.1, momentum=0.9)"
    metrics: str = "['mae']"
    compiled: Mapping[str, str] = field(default_factory=dict)
    fit: Mapping[str, str] = field(default_factory=dict)
    policy: str = "float32"
    answers: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return what `Case(**...)` takes."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"
