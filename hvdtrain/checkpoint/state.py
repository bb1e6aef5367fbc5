"""Captures the whole state of a training from the ranks, and restores it on the same or other ranks.

The state is kept twice. First as one process would have it: variables pass through `parallel.gather_scatter` under
names that are the same in every layout, with accumulated gradients summed and statistics averaged. Any number of ranks
in any layout can resume from that. Second as each rank has it, because sums would differ in their last bits: seeds,
statistics that are averaged only at the end of an epoch, accumulated gradients, metrics within an epoch, and what ranks
that train alone between synchronizations have made of the weights. Ranks in the same number and layout as before resume
from that. For others the metrics are merged on resuming.

Not saved: the counters of TensorFlow's stateful random operations (tf.random.normal), which cannot be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.random_states import random_states, set_random_states
from hvdtrain.collectives.error_feedback import Memory
from hvdtrain.collectives.metric_merging import SUM, combine, declared_rule
from hvdtrain.collectives.metrics import state_variables, without_sums
from hvdtrain.collectives.statistics import (
    average_statistics,
    fold_rank_into_seeds,
    statistics_variables,
)
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import reducer_of
from hvdtrain.keras_internals.models import refresh_constants
from hvdtrain.keras_internals.optimizers import accumulators, is_distributed, optimizer_slots
from hvdtrain.keras_internals.variables import (
    identities,
    identity,
    local_variables,
    row_states,
    seed_variables,
    shared_memory_value,
    tf_variable,
    unique,
    untracked_variables,
    untrained,
)
from hvdtrain.parallel.gather_scatter import Entry, Piece, State, agree, gather, scatter
from hvdtrain.parallel.state_layout import round_pieces
from hvdtrain.parallel.whole_file import DividedState, whole_variables
from hvdtrain.strategies.horovod import HorovodStrategy

Own = dict[str, Any]


@dataclass(frozen=True)
class _Parts:
    """The variables of the state, kept because finding them takes longer than reading them.

    Attributes:
        own: Variables of each rank's own state; see `own_variables`.
        metrics: Those of them that belong to metrics.
        statistics: Those that are averaged over the ranks.
        untracked: Those that Keras does not track.
        pieces: This rank's pieces of the state that passes through `gather`.
        entries: What all ranks hold of that state.
        untrained: Names in the state of weights that no gradient changes.
    """

    own: list[tf.Variable]
    metrics: list[Any]
    statistics: list[tf.Variable]
    untracked: list[tf.Variable]
    pieces: list[Piece]
    entries: list[Entry]
    untrained: set[str]


class TrainingState:
    """The state of a model, its optimizer and its metrics, all of them built.

    Args:
        model: Model that this rank trains.
        strategy: Strategy by which all ranks train it.
    """

    def __init__(self, model: keras.Model, strategy: HorovodStrategy) -> None:
        self._model = model
        self._strategy = strategy
        self._ranks = strategy.position.everyone
        self._rounds = strategy.runner.rounds
        self._parts: _Parts | None = None
        self._memory: State = {}

    @property
    def untrained(self) -> set[str]:
        """Names in the state of weights that no gradient changes; known after `own`."""
        assert self._parts is not None
        return self._parts.untrained

    def own(self, of_process: Any, rules: Mapping[int, str]) -> Own:
        """Return this rank's own state. A collective.

        Args:
            of_process: Further state of this process, in types that `encoding.encode` accepts.
            rules: Id of a metric's tf.Variable -> rule to merge it with, for those that do not add up; see
                `metric_merging`.
        """
        parts = self._parts = self._parts or self._find_parts()
        values = {id(v): shared_memory_value(v) for v in parts.own}
        optimizer = self._model.optimizer
        return {
            "variables": list(values.values()),
            "untracked": [values[id(v)] for v in parts.untracked],
            "process": of_process,
            **random_states(),
            "metrics": [values[identity(v)] for v in parts.metrics],
            "rules": [declared_rule(v) or rules.get(identity(v), SUM) for v in parts.metrics],
            "merged_with": list(self._strategy.position.data_set.ranks),
            "weighted": is_distributed(optimizer) and reducer_of(optimizer).reduction.weighted,
            "round": None if self._rounds is None else self._rounds.state(),
        }

    def variables(self) -> State:
        """Return the variables on rank 0; those of rank 0, if ranks train alone now. A collective; call it after `own`.

        The next call reuses the memory of the returned arrays.
        """
        parts = self._parts
        assert parts is not None
        kept = [v.value() for v in parts.statistics]
        if kept:
            here, local = self._strategy.position, local_variables(self._model)
            average_statistics(self._model, local, here.data_set)
        arrays = gather(parts.pieces, self._ranks, parts.entries, self._memory)
        for variable, value in zip(parts.statistics, kept, strict=True):
            variable.assign(value)
        return arrays

    def give(
        self,
        arrays: State | None,
        ranks: list[Own] | None,
        alike: bool,
        generators: bool = True,
    ) -> list[Any]:
        """Restore what `variables` and `own` returned. A collective.

        Args:
            arrays: Variables, on rank 0; ignored on other ranks.
            ranks: Own state of each rank, on rank 0; ignored on other ranks.
            alike: Whether number and layout of the ranks are the same as when the state was saved.
            generators: Whether to restore Python's and NumPy's random generators, too.

        Returns:
            The `of_process` of each rank that saved.

        Raises:
            UsageError: On all ranks, if the variables differ from the saved ones; names the first one.
        """
        everyone = self.give_variables(arrays, ranks, alike)
        set_random_states(everyone[self._ranks.rank() if alike else 0], generators)
        return [own["process"] for own in everyone]

    def give_variables(
        self, arrays: State | None, ranks: list[Own] | None, alike: bool
    ) -> list[Own]:
        """Restore as `give` does, except the state of the process; return the own states of the ranks as saved."""
        scatter(self._pieces(), arrays, self._ranks)
        refresh_constants(self._model)
        everyone: list[Own] = self._ranks.exchange(ranks, "own_state")[0]
        if alike:
            own = everyone[self._ranks.rank()]
            _assign(own_variables(self._model), own["variables"])
            if self._rounds is not None:
                self._rounds.restore(own["round"])
        else:
            self._give_others(everyone)
        return everyone

    def _give_others(self, everyone: Sequence[Own]) -> None:
        """Restore the ranks' own states on other ranks: merged, as one process would have them."""
        model, index = self._model, self._strategy.part.index
        fold_rank_into_seeds(seed_variables(model), index)
        if self._rounds is not None:
            self._rounds.restore_average([own["round"] for own in everyone])
        _assign(untracked_variables(model), everyone[0]["untracked"])
        self._give_errors(everyone)
        variables = state_variables(model.metrics)
        shapes = [tuple(v.shape) for v in variables]
        # In a pipeline the last stage has the metrics.
        for own in reversed(everyone):
            if [value.shape for value in own["metrics"]] == shapes:
                _assign(variables, _merged_metrics(own, everyone))
                rules = zip(variables, own["rules"], strict=True)
                if index:
                    without_sums(model.metrics, {identity(v): r for v, r in rules if r})
                return

    def _give_errors(self, everyone: Sequence[Own]) -> None:
        """Give this rank its part of what others have not sent of their gradients: see error_feedback.py."""
        memories = _memories(self._model)
        if not memories:
            return
        places = {identity(v): n for n, v in enumerate(own_variables(self._model))}
        weighted = reducer_of(self._model.optimizer).reduction.weighted
        parts = 1 if everyone[0]["weighted"] else len(everyone)
        parts *= self._ranks.size() if weighted else 1
        for memory in memories:
            errors = [own["variables"][places[id(memory.error)]] for own in everyone]
            memory.error.assign(sum(errors) / parts)
            for variable in memory.shared:
                variable.assign(everyone[0]["variables"][places[id(variable)]])

    def _find_parts(self) -> _Parts:
        """Find the variables, all of which exist after the first step. A collective."""
        model, pieces = self._model, self._pieces()
        return _Parts(
            [tf_variable(v) for v in own_variables(model)],
            state_variables(model.metrics),
            [tf_variable(v) for v in statistics_variables(model, local_variables(model))],
            [tf_variable(v) for v in untracked_variables(model)],
            pieces,
            agree(pieces, self._ranks),
            untrained(whole_variables(model)),
        )

    def _pieces(self) -> list[Piece]:
        pieces = DividedState(self._strategy.position).pieces(self._model)
        if self._rounds is None:
            return pieces
        return [*pieces, *round_pieces(self._rounds.replicated_variables, self._ranks.rank() == 0)]


def _merged_metrics(own: Own, everyone: Sequence[Own]) -> list[np.ndarray]:
    """Merge the metrics of the ranks that trained the same part of the model as the rank of `own` on other examples."""
    if "merged_with" not in own:  # The checkpoint is an older one, with merged metrics.
        return list(own["metrics"])
    states = [everyone[rank]["metrics"] for rank in own["merged_with"]]
    shares = [1.0 / len(states)] * len(states)
    each = zip(own["rules"], zip(*states, strict=True), strict=True)
    return [combine(rule, values, shares) for rule, values in each]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    if [tuple(v.shape) for v in variables] != [value.shape for value in values]:
        raise UsageError(
            "the shapes of seeds, statistics or metrics on this rank differ from those in the checkpoint"
        )
    for variable, value in zip(variables, values, strict=True):
        tf_variable(variable).assign(value)


def _memories(model: keras.Model) -> list[Memory]:
    """Return what a lossy compression remembers of the gradients."""
    optimizer = model.optimizer
    return list(reducer_of(optimizer).memories.values()) if is_distributed(optimizer) else []


def own_variables(model: keras.Model) -> list[Any]:
    """Return the variables that may differ between ranks with the same part of `model`."""
    local = local_variables(model)
    known = identities(local)
    slots = [
        slot
        for variable, state in optimizer_slots(model.optimizer)
        if identity(variable) in known
        for slot in state
    ]
    return unique(
        [
            *seed_variables(model),
            *row_states(model),
            *statistics_variables(model, local),
            *untracked_variables(model),
            *local,
            *slots,
            *accumulators(model.optimizer),
            *(v for memory in _memories(model) for v in (memory.error, *memory.shared)),
            *state_variables(model.metrics),
        ]
    )
