"""Runner: the part of HorovodStrategy that builds a model on a rank and runs its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import keras

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import require_alike
from hvdtrain.collectives.mesh import Position
from hvdtrain.collectives.metrics import state_variables
from hvdtrain.collectives.replicas import require_same_model
from hvdtrain.data import Share
from hvdtrain.keras_internals.adapted import adapted_statistics
from hvdtrain.keras_internals.building import build_model, symbolic_call
from hvdtrain.keras_internals.models import metric_names, symbolic_inputs
from hvdtrain.keras_internals.variables import tf_variable
from hvdtrain.strategies.gather import gather_predictions
from hvdtrain.strategies.rank_steps import RankSteps
from hvdtrain.strategies.step_metrics import merged_logs
from hvdtrain.strategies.strategy import Logs, ModelSource, Steps

if TYPE_CHECKING:
    from hvdtrain.strategies.rounds import Rounds


class Runner:
    """Runner on a rank that holds the whole model.

    Attributes:
        rounds: Rounds of ranks that train alone for some steps; None: every step is made together.
        skips_steps: Whether on_nan="skip" works.
    """

    rounds: Rounds | None = None
    skips_steps = True

    def __init__(self, position: Position) -> None:
        self.position = position

    def build(self, model: ModelSource) -> keras.Model:
        """Return the model that this rank trains, given the whole model or a function that builds it."""
        made: keras.Model = model if isinstance(model, keras.Model) else model()
        return made

    def inputs(self, model: keras.Model) -> list[Any]:
        """Return the symbolic inputs that the data must fit; see Strategy.inputs."""
        return symbolic_inputs(model)

    def build_variables(self, model: keras.Model, data: Any, what: str) -> None:
        """Create all variables of a compiled model, and compare their shapes over ranks; see Strategy.prepare."""
        build_model(model, data)
        built = {
            "the model's variables": [[list(v.shape), str(v.dtype)] for v in model.variables],
            "the metrics": metric_names(model),
            "the states of the metrics": [
                list(tf_variable(v).shape) for v in state_variables(model.metrics)
            ],
        }
        require_same_model(built, model, what, "model")
        _require_same_statistics(model, what)

    def build_to_predict(self, model: keras.Model, inputs: Any) -> None:
        """Create the variables that `model` needs to predict from symbolic `inputs`."""
        symbolic_call(model, inputs)

    def steps(self, model: keras.Model, data: Any = None) -> Steps:
        """Return the steps of a built model.

        Args:
            model: Built model.
            data: Symbolic (x, y, sample_weight). None: the steps only predict.
        """
        del data
        here = self.position
        return RankSteps(model, here.data_set, copy=here.tensor_set.ranks)

    def logs(self, model: keras.Model, step_logs: Logs, share: Share) -> Logs:
        """Return the metrics since their reset, over all ranks; see Strategy.logs."""
        return merged_logs(model, step_logs, share, self.position.data_set)

    def end_round(self) -> None:
        """Give all ranks the same weights, where they train alone for some steps: see rounds.py. A collective then."""

    def gather(self, outputs: Iterable[tuple[Share, Any]]) -> Any:
        """Return the outputs for all examples, in order, on every rank."""
        return gather_predictions(outputs, self.position.data_set)


def _require_same_statistics(model: keras.Model, what: str) -> None:
    """Require that all ranks that have adapted a Normalization layer have learnt the same. A collective.

    The others get the first rank's variables: of data that each rank had a part of, they know that part only.
    """
    own = adapted_statistics(model)
    known: dict[str, list[float | str]] = {}
    for theirs in ALL_RANKS.exchange(own, "adapted"):
        known = theirs | known
    require_alike(known | own, what)
