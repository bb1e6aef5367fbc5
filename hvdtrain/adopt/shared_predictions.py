"""Shares keras.Model.predict among the ranks, in whole batches of the script.

Each rank calls Keras's predict with its part of the batches, one after the other, so that each batch is computed as on
one process, whatever the model does with it. Then all ranks receive the results of all, or learn that one has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.data.structures import checksum
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.models import overridden, own_non_trainable_variables
from hvdtrain.keras_internals.variables import (
    assign,
    row_states,
    seed_variables,
    tf_variable,
    unique,
    untracked_variables,
)
from hvdtrain.runtime import Rank


def predict_together(predict: Callable[[], Any], model: keras.Model, x: Any) -> Any:
    """Return what Keras predicts for `x`, of which each rank computes a part. A collective.

    Args:
        predict: Returns Keras's prediction for this rank's part.
        model: A model, with the same state on all ranks.
        x: Inputs, in any structure.

    Raises:
        UsageError: On all ranks: the prediction cannot be shared, or a rank has failed. The model is as before.
    """
    state = _state(model)
    before = [variable.numpy() for variable in state]
    result, problem = None, ""
    try:
        result = predict()
    except Exception as error:  # Whatever it is: plain Keras is to raise it on all ranks.
        problem = f"{type(error).__name__} on rank {ALL_RANKS.rank()}"
    after = [variable.numpy() for variable in state]
    if not all(map(np.array_equal, before, after)):
        problem = "the model changes its state"
    outputs = keras.tree.flatten(result)
    if not all(isinstance(output, np.ndarray) for output in outputs):
        problem = problem or "an output is no array"
    kinds = [f"{output.dtype} {output.shape[1:]}" for output in outputs if not problem]
    told = [problem, str(kinds), checksum(keras.tree.map_structure(np.asarray, x))]
    problem = _first_problem(ALL_RANKS.exchange(told, "adopted_prediction"))
    if problem:
        assign(state, before)
        raise UsageError(problem)
    everyone = ALL_RANKS.exchange(outputs, "adopted_predictions")
    joined = [np.concatenate(parts) for parts in zip(*everyone, strict=True)]
    return keras.tree.pack_sequence_as(result, joined)


def own_rows(model: keras.Model, x: Any, batch_size: int, rank: Rank) -> Any:
    """Return this rank's rows of `x`: whole batches, but for the last one.

    Args:
        model: A model, with the same state on all ranks.
        x: Inputs, in any structure.
        batch_size: Number of examples in a batch.
        rank: This process's place in the job.

    Raises:
        UsageError: On all ranks alike: they cannot be divided.
    """
    if overridden(model, "predict", "predict_step", "make_predict_function"):
        raise UsageError("the model has its own way to predict")
    leaves = keras.tree.flatten(x)
    if not all(isinstance(leaf, np.ndarray | tf.Tensor) and leaf.shape for leaf in leaves):
        raise UsageError("the data is not in arrays")
    lengths = {leaf.shape[0] for leaf in leaves}
    batches = -(-max(lengths) // batch_size) if len(lengths) == 1 else 0
    if batches < rank.size:
        raise UsageError("there are fewer batches than workers")
    begin, end = (batches * n // rank.size * batch_size for n in (rank.rank, rank.rank + 1))
    return keras.tree.map_structure(lambda leaf: leaf[begin:end], x)


def _state(model: keras.Model) -> list[tf.Variable]:
    """Return the variables that a prediction may change: with a random seed, it draws for all of the batches."""
    own = [*own_non_trainable_variables(model), *seed_variables(model), *row_states(model)]
    return [*map(tf_variable, unique(own)), *untracked_variables(model)]


def _first_problem(told: list[Any]) -> str:
    """Return why the parts of the ranks are no whole, from what each of them tells; "" if they are."""
    problems, kinds, checksums = zip(*told, strict=True)
    if any(problems):
        return next(filter(None, problems))
    if len(set(checksums)) > 1:
        return "the workers have different data"
    return "the outputs of batches differ in shape" if len(set(kinds)) > 1 else ""
