"""Keras variables whose values are in other processes (parameter servers). Tested with Keras 3.15.

`StepVariable`: its value can be a tensor while a step is traced, so that the step returns the values it would assign.
`SplitVariable`: its rows are on several devices, and it looks like one variable to layers and optimizers.
`update_where_variables_are`: lets an optimizer compute each update on the variable's device, part by part.
`look_up_rows`: lets Embedding layers read only the rows they need. (Keras reads the whole table.)

Existing variables are changed to these classes in place, so that layers, optimizers and user code keep their
references.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.elementwise import ELEMENTWISE
from hvdtrain.keras_internals.optimizers import AppliesByKeras, optimizer_slots, rate_variable
from hvdtrain.keras_internals.overlay import overlay
from hvdtrain.keras_internals.variables import exchange_value


class StepVariable(keras.Variable):
    """A Keras variable that a traced step can read and assign without changing its value.

    Attributes:
        in_step: Value inside the step that is being traced; None outside of one.
    """

    in_step: Any = None

    @property
    def value(self) -> Any:
        if self.in_step is not None:
            return self._maybe_autocast(self.in_step)
        return super().value

    def assign(self, value: Any) -> Any:
        if self.in_step is None:
            return super().assign(value)
        self.in_step = tf.ensure_shape(
            self._convert_to_tensor(value, dtype=self._dtype), self.shape
        )
        return self.in_step

    def add(self, difference: tf.Tensor) -> None:
        """Add to the value, so that nothing is lost of what others add at the same time."""
        self._value.assign_add(difference)


@contextlib.contextmanager
def in_step(variables: Sequence[StepVariable], values: Sequence[Any]) -> Iterator[None]:
    """Context in which `variables` have `values`, and assignments have no effect outside of it."""
    for variable, value in zip(variables, values, strict=True):
        variable.in_step = value
    try:
        yield
    finally:
        for variable in variables:
            variable.in_step = None


@contextlib.contextmanager
def _adding_changes(variables: Sequence[StepVariable]) -> Iterator[None]:
    """Context after which what assignments in it have changed is added to `variables`."""
    before = [tf.convert_to_tensor(variable.value) for variable in variables]
    with in_step(variables, before):
        yield
        after = [variable.in_step for variable in variables]
    for variable, old, new in zip(variables, before, after, strict=True):
        if new is not old:
            variable.add(new - old)


class SplitVariable(StepVariable):
    """A Keras variable whose first axis is divided into parts.

    Reading it concatenates the parts. The gradient is that of the whole variable, dense or IndexedSlices. It flows to
    `anchor`, a scalar that is an input of every read, and that tapes differentiate with respect to in place of the
    variable.

    Attributes:
        parts: The tf.Variables of the parts, in the order of the rows.
        anchor: The scalar tf.Variable.
        chosen: Index of the part that this variable represents while an optimizer updates that part; otherwise None.
    """

    parts: Sequence[tf.Variable]
    anchor: tf.Variable
    chosen: int | None = None

    @property
    def value(self) -> Any:
        if self.in_step is not None:
            return self._maybe_autocast(self.in_step)
        if self.chosen is not None:
            return self.parts[self.chosen]
        whole = _joined(self.anchor, *[part.read_value() for part in self.parts])
        return self._maybe_autocast(tf.ensure_shape(whole, self._shape))

    @property
    def handle(self) -> Any:
        return self.anchor.handle

    @property
    def shape(self) -> Any:
        return tf.TensorShape(self._shape) if self.chosen is None else self.parts[self.chosen].shape

    def rows(self, indices: tf.Tensor) -> tf.Tensor:
        """Return the rows with the given indices; only these rows are transferred."""
        found = tf.compat.v1.nn.embedding_lookup(
            list(self.parts), indices, partition_strategy="div"
        )
        return _looked_up(self.anchor, found, indices, tuple(self._shape))

    def pieces(self, gradient: Any) -> list[Any]:
        """Split the gradient of the whole variable into those of its parts."""
        sizes = [int(part.shape[0]) for part in self.parts]
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.split(gradient, sizes)
        pieces, begin = [], 0
        for part, size in zip(self.parts, sizes, strict=True):
            inside = (gradient.indices >= begin) & (gradient.indices < begin + size)
            values = tf.boolean_mask(gradient.values, inside)
            indices = tf.boolean_mask(gradient.indices, inside) - begin
            pieces.append(
                tf.IndexedSlices(values, indices, tf.constant(part.shape.as_list(), tf.int64))
            )
            begin += size
        return pieces

    def _direct_assign(self, value: Any) -> None:
        pieces = tf.split(tf.cast(value, self._dtype), [int(part.shape[0]) for part in self.parts])
        for part, piece in zip(self.parts, pieces, strict=True):
            part.assign(piece)

    def add(self, difference: tf.Tensor) -> None:
        if self.chosen is not None:
            self.parts[self.chosen].assign_add(difference)
            return
        pieces = tf.split(difference, [int(part.shape[0]) for part in self.parts])
        for part, piece in zip(self.parts, pieces, strict=True):
            part.assign_add(piece)


def _joined(anchor: tf.Variable, *parts: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def join(anchor_value: tf.Tensor, *pieces: tf.Tensor) -> Any:
        return tf.concat(pieces, 0), lambda upstream: (upstream, *([None] * len(pieces)))

    return join(anchor.read_value(), *parts)


def _looked_up(
    anchor: tf.Variable, rows: tf.Tensor, indices: tf.Tensor, shape: tuple[int, ...]
) -> tf.Tensor:
    @tf.custom_gradient
    def take(anchor_value: tf.Tensor, rows: tf.Tensor, indices: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> Any:
            values = tf.reshape(upstream, [-1, *shape[1:]])
            slices = tf.IndexedSlices(
                values, tf.reshape(indices, [-1]), tf.constant(shape, tf.int64)
            )
            return slices, None, None

        return tf.identity(rows), gradient

    return take(anchor.read_value(), rows, indices)


def make_step_variable(variable: Any) -> StepVariable:
    """Make a Keras variable a StepVariable."""
    if not isinstance(variable, StepVariable):
        variable.__class__ = StepVariable
    return variable


def replace_value(variable: Any, value: tf.Variable) -> None:
    """Replace the tf.Variable inside a Keras variable, and make it a StepVariable."""
    exchange_value(variable, value)
    make_step_variable(variable)


@contextlib.contextmanager
def kept_variables() -> Iterator[None]:
    """Context in which TensorFlow may connect this process to others; Keras variables keep their values.

    An older tf.Variable can still be read after that, but assignments to it are lost: each Keras variable gets a new
    one. Keras has no list of its variables, so all Python objects are searched, once.
    """
    found = [v for v in gc.get_objects() if issubclass(type(v), keras.Variable)]
    values = [(v, v._value.numpy()) for v in found if isinstance(v._value, tf.Variable)]
    yield
    for variable, value in values:
        exchange_value(variable, value)


def split_value(variable: Any, parts: Sequence[tf.Variable], anchor: tf.Variable) -> None:
    """Make a Keras variable a SplitVariable of these parts."""
    exchange_value(variable, parts[0])  # By which an optimizer knows the whole.
    variable.__class__ = SplitVariable
    variable.parts, variable.anchor = tuple(parts), anchor
    variable._value = None


def tf_variables(variable: Any) -> list[tf.Variable]:
    """Return the tf.Variables that hold a Keras variable's value."""
    return list(variable.parts) if isinstance(variable, SplitVariable) else [variable._value]


class _UpdatesWhereVariablesAre(AppliesByKeras):
    """Optimizer mixin that updates each variable, or part of one, on its own device."""

    owners: dict[Any, tuple[Any, int]]
    """_unique_id of a part of a SplitVariable -> (the variable, index of the part)."""
    counters: list[StepVariable]
    """State on a server that belongs to no weight, such as Nadam's product of momenta."""
    arrival: tf.Operation | None
    """Operation of the last traced step that runs when all gradients are on the devices of their variables."""

    def _var_key(self, variable: Any) -> Any:
        if isinstance(variable, keras.Variable):
            variable = tf_variables(variable)[0]
        return super()._var_key(variable)  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        known = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
        bound = [v for v in known if getattr(v, "constraint", None) is not None]
        constraints = [v.constraint for v in bound]
        for variable in bound:
            # Keras would assign what it makes of the value that it read.
            variable.constraint = None
        try:
            result = super().apply(grads, trainable_variables)
        finally:
            for variable, constraint in zip(bound, constraints, strict=True):
                variable.constraint = constraint
        with _adding_changes(bound):
            for variable in bound:
                variable.assign(variable.constraint(variable))
        return result

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        gradients: list[Any] = []
        variables: list[Any] = []
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            if isinstance(variable, SplitVariable) and gradient is not None:
                gradients += variable.pieces(gradient)
                variables += variable.parts
            elif not isinstance(variable, SplitVariable):
                gradients.append(gradient)
                variables.append(variable)
        pairs = zip(gradients, variables, strict=True)
        gradients = [_beside(variable, gradient) for gradient, variable in pairs]
        # No variable changes before all gradients have arrived: a process that dies while it computes or
        # sends gradients has changed nothing.
        if arrival(self):
            raise UsageError(
                "The train_step applies gradients twice, but with strategy='parameter-server' a step must be "
                "a single update that another worker can repeat: apply once, or use strategy='horovod'"
            )
        arrived = tf.group(*[g for g in gradients if g is not None])
        object.__setattr__(self, "arrival", arrived)
        with tf.control_dependencies([arrived]), _adding_changes(self.counters):
            self._decay(trainable_variables)
            super()._backend_update_step(gradients, variables, learning_rate)  # type: ignore[misc]

    def _distributed_tf_update_step(self, _: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        slots = [held for _, held in optimizer_slots(self)]
        for gradient, variable in grads_and_vars:
            index = self._get_variable_index(variable)  # type: ignore[attr-defined]
            with tf.device(variable.device), self._updating(slots[index], variable):
                self.update_step(gradient, variable, learning_rate)  # type: ignore[attr-defined]

    def assign(self, variable: Any, value: Any) -> None:
        self._assign("assign", variable, value)

    def assign_add(self, variable: Any, value: Any) -> None:
        self._assign("assign_add", variable, value)

    def assign_sub(self, variable: Any, value: Any) -> None:
        self._assign("assign_sub", variable, value)

    def _assign(self, how: str, variable: Any, value: Any) -> None:
        """Assign to a variable as it is in the step, if it has a value there; Keras would assign to its tf.Variable."""
        if getattr(variable, "in_step", None) is None:
            getattr(super(), how)(variable, value)
        else:
            getattr(variable, how)(tf.convert_to_tensor(value))

    def _apply_weight_decay(self, variables: Any) -> None:
        """Do nothing here: `_backend_update_step` applies weight decay later."""

    def _use_weight_decay(self, variable: Any) -> bool:
        owner, _ = self.owners.get(self._var_key(variable), (variable, 0))
        return bool(super()._use_weight_decay(owner))  # type: ignore[misc]

    def _decay(self, variables: Any) -> None:
        plain = super()._apply_weight_decay  # type: ignore[misc]
        if plain.__func__ is not keras.optimizers.Optimizer._apply_weight_decay:
            # Muon overrides it, and reads and assigns whole variables.
            with _adding_changes(variables):
                plain(variables)
            return
        if self.weight_decay is None:  # type: ignore[attr-defined]
            return
        for variable in variables:
            for part in tf_variables(variable):
                if self._use_weight_decay(part):
                    with tf.device(part.device):
                        rate = tf.cast(self.learning_rate, part.dtype)  # type: ignore[attr-defined]
                        part.assign_sub(part * tf.cast(self.weight_decay, part.dtype) * rate)  # type: ignore[attr-defined]

    def _update_model_variables_moving_average(self, trainable_variables: Any) -> None:
        averages = self._model_variables_moving_average if self.use_ema else []  # type: ignore[attr-defined]
        with _adding_changes([average for average in averages if average is not None]):
            super()._update_model_variables_moving_average(trainable_variables)  # type: ignore[misc]

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> None:
        with _adding_changes(trainable_variables):
            BaseOptimizer._overwrite_model_variables_with_average_value(self, trainable_variables)

    @contextlib.contextmanager
    def _updating(self, slots: list[Any], variable: tf.Variable) -> Iterator[None]:
        """Context in which the slots of a weight, or of the part that `variable` is of one, change by additions."""
        _, number = self.owners.get(variable._unique_id, (None, None))
        for slot in slots:
            slot.chosen = number
        try:
            with _adding_changes(slots):
                yield
        finally:
            for slot in slots:
                slot.chosen = None


def _beside(variable: Any, gradient: Any) -> Any:
    """Copy a gradient to the device of its Keras or TensorFlow variable."""
    if gradient is None:
        return None
    held = variable.value if isinstance(variable, keras.Variable) else variable
    with tf.device(held.device):
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.identity(gradient)
        values, indices = tf.identity(gradient.values), tf.identity(gradient.indices)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)


def arrival(optimizer: Any) -> list[tf.Operation]:
    """Return the operation after which the step that is being traced updates weights; [] if there is none yet."""
    found = getattr(optimizer, "arrival", None)
    if found is None or found.graph is not tf.compat.v1.get_default_graph():
        return []
    return [found]


def update_where_variables_are(optimizer: Any) -> None:
    """Make a built optimizer update each variable on its device. Call it after variables are replaced or split."""
    overlay(optimizer, _UpdatesWhereVariablesAre)
    owners: dict[Any, tuple[Any, int]] = {}
    indices: dict[Any, int] = {}
    for index, variable in enumerate(optimizer._trainable_variables):
        for number, part in enumerate(tf_variables(variable)):
            indices[part._unique_id] = index
            if isinstance(variable, SplitVariable):
                owners[part._unique_id] = (variable, number)
    slots = [slot for _, held in optimizer_slots(optimizer) for slot in held]
    others = {id(v) for v in [*step_constants(optimizer), *slots]}
    counters = [v for v in optimizer.variables if id(v) not in others]
    # Not through Keras's __setattr__, which would track (and save) these attributes.
    object.__setattr__(optimizer, "owners", owners)
    object.__setattr__(optimizer, "counters", counters)
    object.__setattr__(optimizer, "arrival", None)
    object.__setattr__(optimizer, "_trainable_variables_indices", indices)


def may_be_split(optimizer: Any) -> bool:
    """Whether an optimizer can update a variable part by part."""
    return type(optimizer) in ELEMENTWISE and not optimizer.use_ema


def step_constants(optimizer: Any) -> list[Any]:
    """Return the optimizer's variables that belong to no weight: step counter and learning rate (not a schedule)."""
    rate = rate_variable(optimizer)
    return [optimizer._iterations, *([] if rate is None else [rate])]


class _LooksUpRows:
    """Embedding mixin that reads only the rows it needs."""

    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor)):
            return super().call(inputs)  # type: ignore[misc]
        variable = self._embeddings  # type: ignore[attr-defined]
        indices = tf.cast(tf.convert_to_tensor(inputs), tf.int64)
        size = self.input_dim  # type: ignore[attr-defined]
        indices = tf.where(indices < 0, indices + size, indices)
        if isinstance(variable, SplitVariable):
            found = variable.rows(indices)
        else:
            found = tf.nn.embedding_lookup(variable._value, indices)
        return tf.cast(found, self.compute_dtype)  # type: ignore[attr-defined]


def look_up_rows(model: keras.Model) -> None:
    """Let the Embedding layers of a built model read only the rows that they need."""
    for layer in model._flatten_layers():
        if (
            isinstance(layer, keras.layers.Embedding)
            and type(layer).call is keras.layers.Embedding.call
            and not layer.lora_enabled
            and layer.quantization_mode is None
        ):
            overlay(layer, _LooksUpRows)
