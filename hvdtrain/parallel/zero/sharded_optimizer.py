"""ShardedOptimizer: each rank keeps the optimizer state for its part of every variable (ZeRO stage 1).

Rajbhandari et al. 2020 (arXiv:1910.02054), section 5.1. In a step, gradients are reduce-scattered, each rank updates
its part of the weights, and the new weights are all-gathered. For n float32 elements and Adam on N ranks, each rank
holds 4n bytes of weights, 4n of gradients and 8n/N of state, where DistributedOptimizer holds 8n of state; the traffic
is that of an allreduce.

The wrapped Keras optimizer computes the update. For each variable it is given a flat tf.Variable that holds this
rank's part, and only during the step, so its state is as large as the part. The hooks are those of DistributedOptimizer
(see keras.optimizer): `_clip_gradients` takes whole gradients and returns parts; `_backend_update_step` updates the
parts and gathers the weights. What Keras does per variable (exclusion from weight decay, clipping, averages,
accumulation) remains per variable.

Gradient accumulation (gradient_accumulation_steps) keeps whole sums on each rank: 4n bytes more, as without sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator, ranks_of
from hvdtrain.collectives.packing import bounded_groups
from hvdtrain.collectives.reduction import Reduction
from hvdtrain.errors import UsageError
from hvdtrain.keras.loss_scaling import correct_loss_scaling
from hvdtrain.keras.optimizer import _Distributed, distribute, require_plain
from hvdtrain.keras_internals.copies import plain_optimizer
from hvdtrain.keras_internals.corrections import outside_clusters, prepare_keras
from hvdtrain.keras_internals.elementwise import require_elementwise
from hvdtrain.keras_internals.optimizer_state import prepare_sharded_files, slot_name, take_state
from hvdtrain.keras_internals.overlay import overlay
from hvdtrain.keras_internals.variables import bytes_of, identity, tf_variable, variable_name
from hvdtrain.parallel.state_layout import optimizer_pieces
from hvdtrain.parallel.zero.reducer import ShardedReducer

_ACCUMULATOR = "gradient_accumulator"
"""Keras's name for the accumulated gradient of a variable."""

GATHERED_BYTES = 32 * 2**20
"""Size of the groups in which weights are gathered: enough for full speed, little compared with the model."""


class _Sharded(_Distributed):
    """Mixin of methods that ShardedOptimizer puts before those of the wrapped optimizer's class."""

    hvdtrain_reducer: ShardedReducer
    hvdtrain_parts: dict[int, tf.Variable]
    hvdtrain_owners: dict[str, Any]
    hvdtrain_whole: list[np.ndarray] | None
    hvdtrain_loaded: list[np.ndarray] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _begin(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError(
            "A sharded optimizer cannot be copied or pickled: its state is spread over several "
            "ranks. Copy the plain one"
        )

    def register_local_var(self, var: Any) -> None:
        if self.built:  # type: ignore[attr-defined]
            raise UsageError(
                "register_local_var: the state of a sharded optimizer is divided when it is "
                "built: call this first"
            )
        super().register_local_var(var)

    # Building: state of the size of the parts.

    def build(self, variables: Any) -> None:
        if self.built:  # type: ignore[attr-defined]
            return
        variables = list(variables)
        for variable in variables:
            part = _empty_part(variable)
            self.hvdtrain_parts[identity(variable)] = part
            self.hvdtrain_owners[self._var_key(part)] = variable  # type: ignore[attr-defined]
        super().build(variables)
        for key, variable in self.hvdtrain_owners.items():
            self._trainable_variables_indices[key] = self._get_variable_index(variable)  # type: ignore[attr-defined]
        known = {id(v) for v in self.hvdtrain_reducer.own_state}
        for variable in self.variables:  # type: ignore[attr-defined]
            if len(variable.shape) and id(variable) not in known:
                raise UsageError(
                    f"{type(self).__name__} makes the state {variable_name(variable)!r} without "
                    "add_variable_from_reference, so that it cannot be sharded"
                )

    def add_variable_from_reference(
        self, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> Any:
        shape = tuple(reference_variable.shape)
        if name != _ACCUMULATOR:
            shape = (self.hvdtrain_reducer.partition(reference_variable).size,)
        variable = self.add_variable(  # type: ignore[attr-defined]
            shape=shape,
            initializer=initializer,
            dtype=reference_variable.dtype,
            name=slot_name(reference_variable, name or "var"),
        )
        self.hvdtrain_reducer.own_state.append(variable)
        return variable

    # A step.

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        # Parts are empty between steps, and XLA has no variables of changing shape.
        with outside_clusters():
            super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Any) -> Any:
        clipped = super()._clip_gradients(grads)
        for gradient, variable in zip(clipped, self.hvdtrain_reducer.pending, strict=True):
            # Only after the gradient is there: otherwise a graph would read all parts at its beginning.
            with tf.control_dependencies([gradient]):
                self._part(variable).assign(self._part_of(variable))
        return clipped

    def _apply_weight_decay(self, variables: Any) -> None:
        super()._apply_weight_decay([self._part(v) for v in variables])  # type: ignore[misc]

    def _use_weight_decay(self, variable: Any) -> bool:
        owner = self.hvdtrain_owners.get(self._var_key(variable), variable)  # type: ignore[attr-defined]
        return bool(super()._use_weight_decay(owner))  # type: ignore[misc]

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        parts = [self._part(v) for v in trainable_variables]
        super()._backend_update_step(grads, parts, learning_rate)  # type: ignore[misc]
        self._set_whole(trainable_variables, [part.read_value() for part in parts], "weights")
        for part in parts:
            part.assign(tf.zeros([0], part.dtype))

    def _update_model_variables_moving_average(self, trainable_variables: Any) -> None:
        if self.use_ema:  # type: ignore[attr-defined]
            parts = [self._part_of(v) for v in trainable_variables]
            super()._update_model_variables_moving_average(parts)  # type: ignore[misc]

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> None:
        # A collective, also at the end of training (finalize_variable_values).
        averages = self._model_variables_moving_average  # type: ignore[attr-defined]
        pairs = [
            (v, averages[self._get_variable_index(v)])  # type: ignore[attr-defined]
            for v in trainable_variables
        ]
        held = [(v, average.value.read_value()) for v, average in pairs if average is not None]
        self._set_whole([v for v, _ in held], [average for _, average in held], "averages")

    def _part(self, variable: Any) -> tf.Variable:
        """Return the flat tf.Variable for this rank's part of `variable`."""
        return self.hvdtrain_parts[identity(variable)]

    def _part_of(self, variable: Any) -> tf.Tensor:
        """Return this rank's part of the value of `variable`."""
        flat = tf.reshape(tf_variable(variable).read_value(), [-1])
        return self.hvdtrain_reducer.partition(variable).of(flat)

    def _set_whole(self, variables: Sequence[Any], parts: Sequence[tf.Tensor], what: str) -> None:
        """Gather `parts` over the ranks and assign the whole values to `variables`."""
        reducer = self.hvdtrain_reducer
        for variable, part in zip(variables, parts, strict=True):
            part.set_shape([reducer.partition(variable).size])
        pairs = zip(variables, parts, strict=True)
        arrived: list[Any] = []
        for held in bounded_groups(pairs, lambda pair: bytes_of([pair[0]]), GATHERED_BYTES):
            names = [f"{what}_{self._get_variable_index(v)}" for v, _ in held]  # type: ignore[attr-defined]
            # One group at a time, to bound the memory needed beside the weights.
            with tf.control_dependencies(arrived):
                whole = reducer.whole([part for _, part in held], [v for v, _ in held], names)
                arrived = [
                    tf_variable(v).assign(tf.reshape(flat, v.shape), read_value=False)
                    for (v, _), flat in zip(held, whole, strict=True)
                ]

    # Saving and loading.

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Allow rank 0 of the process set to save the optimizer inside the block. Entering it is a collective."""
        keeps = self.process_set.rank() == 0
        whole: list[np.ndarray] = []
        for piece in optimizer_pieces(self):
            value = piece.read()  # Ranks other than 0 hold one array at a time.
            if keeps:
                whole.append(value)
        object.__setattr__(self, "hvdtrain_whole", whole if keeps else None)
        try:
            yield
        finally:
            object.__setattr__(self, "hvdtrain_whole", None)

    def whole_values(self) -> list[np.ndarray]:
        """Return the whole arrays of `variables`, on rank 0 of the process set inside `whole_state`.

        Raises:
            UsageError: Called on another rank or outside `whole_state`.
        """
        if self.hvdtrain_whole is None:
            raise UsageError(
                f"The state of this optimizer is spread over {self.process_set.size()} ranks, and "
                "one alone cannot save it: use Trainer.save, or save inside `with "
                "optimizer.whole_state():`, which all ranks enter"
            )
        return self.hvdtrain_whole

    def set_whole_values(self, values: Sequence[Any]) -> None:
        """Assign to each of `variables` this rank's part of the whole array in `values`."""
        for piece, value in zip(optimizer_pieces(self), values, strict=True):
            piece.write(np.asarray(value))

    def load_whole_values(self, values: Sequence[Any]) -> None:
        """Load whole arrays from a file; keep them until `broadcast_loaded_state`.

        Only one rank may have loaded them.
        """
        values = [np.asarray(value) for value in values]
        self.set_whole_values(values)
        object.__setattr__(self, "hvdtrain_loaded", values)

    def broadcast_loaded_state(self) -> None:
        """Broadcast the state that rank 0 has loaded from a file since the last call. A collective."""
        loaded = self.hvdtrain_loaded
        object.__setattr__(self, "hvdtrain_loaded", None)
        ranks = self.process_set
        if not ranks.is_global():
            return  # Also for a divided model, whose ranks load their own state.
        did = ranks.broadcast(loaded is not None, 0, "hvdtrain_zero_loaded")
        if not did:
            return
        for index, piece in enumerate(optimizer_pieces(self)):
            dtype = tf.as_dtype(piece.dtype).as_numpy_dtype
            mine = np.zeros(piece.shape) if loaded is None else loaded[index]
            value = ranks.broadcast(np.asarray(mine, dtype), 0, f"hvdtrain_zero_loaded_{index}")
            piece.write(value.numpy())

    def save_own_variables(self, store: Any) -> None:
        for index, value in enumerate(self.whole_values()):
            store[str(index)] = value

    def load_own_variables(self, store: Any) -> None:
        if len(store.keys()) != len(self.variables):  # type: ignore[attr-defined]
            super().load_own_variables(store)  # type: ignore[misc]
            return
        self.load_whole_values([store[str(i)] for i in range(len(store.keys()))])


def _begin(optimizer: Any) -> None:
    """Set the attributes that a sharded optimizer needs."""
    # Not through Keras's __setattr__, which would track (and save) the values.
    reducer = ShardedReducer(optimizer.hvdtrain_reduction)
    for name, value in {
        "hvdtrain_reducer": reducer,
        "hvdtrain_parts": {},
        "hvdtrain_owners": {},
        "hvdtrain_whole": None,
        "hvdtrain_loaded": None,
    }.items():
        object.__setattr__(optimizer, name, value)


def _empty_part(variable: Any) -> tf.Variable:
    """Return an empty variable, which holds this rank's part of `variable` during steps."""
    dtype = tf.as_dtype(variable.dtype)
    with tf.init_scope():
        return tf.Variable(tf.zeros([0], dtype), shape=[None], trainable=False, dtype=dtype)


def ShardedOptimizer(
    optimizer: Any,
    process_set: hvd.ProcessSet | Communicator | None = None,
    name: str | None = None,
) -> Any:
    """Wrap a Keras optimizer so that it averages gradients over ranks and shards its state (ZeRO stage 1).

    The optimizer is changed in place and returned; it remains an instance of its class. With one rank the result is
    that of DistributedOptimizer.

    Args:
        optimizer: A keras.optimizers.Optimizer that updates element by element (SGD, Adam and its
            relatives, Lion, Ftrl; not Lamb, Muon, Adafactor), or a LossScaleOptimizer around one.
        process_set: Ranks that hold the same variables; None: all ranks.
        name: Prefix for the names of the collectives; the same on every rank.

    Returns:
        The same optimizer.

    Raises:
        UsageError: The optimizer needs whole variables, or is distributed already.
    """
    return _sharded(optimizer, Reduction(name=name, process_set=ranks_of(process_set)))


def shard(optimizer: Any, reduction: Reduction) -> Any:
    """Shard the state of a plain Keras optimizer over the ranks of `reduction`, for a Trainer; return `optimizer`.

    Raises:
        UsageError: As `ShardedOptimizer`; or the Trainer could not save the optimizer, which takes another one like it.
    """
    plain_optimizer(optimizer)
    return _sharded(optimizer, reduction)


def _sharded(optimizer: Any, reduction: Reduction) -> Any:
    """Make a plain optimizer an instance of a sharded subclass of its class, and divide the state that it has."""
    inner = require_plain(optimizer)
    require_elementwise(inner, "cannot be sharded")
    if reduction.process_set.size() == 1:
        return distribute(optimizer, reduction)
    prepare_keras()
    correct_loss_scaling()
    prepare_sharded_files()
    variables, values = take_state(inner)
    overlay(inner, _Sharded, hvdtrain_reduction=reduction)
    _begin(inner)
    if variables is not None:
        inner.build(variables)
        inner.set_whole_values(values)
    return optimizer
