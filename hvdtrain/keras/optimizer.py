"""DistributedOptimizer: a Keras 3 optimizer whose gradients are averaged over the ranks.

Keras 3 calls `_clip_gradients` exactly once for each update of the weights: after loss unscaling and gradient
accumulation, before clipping, weight decay and moving averages. The gradients are reduced there, so that clipping sees
averaged gradients, and gradient accumulation communicates only when it updates. (Horovod's own class overrides methods
that Keras 3 never calls, and averages nothing.)

The class of the wrapped optimizer is replaced by a subclass, in place: `isinstance`, built state, learning rate and
configuration stay, and files name the original class, so that plain Keras loads them where Horovod is not installed.

Loss scaling: with a LossScaleOptimizer, its inner optimizer becomes the distributed one, and the ranks agree on whether
the gradients are finite before any of them skips the step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvdtrain.collectives.clipping import clip_by_norm
from hvdtrain.collectives.communicator import Average, Communicator, Max, ranks_of
from hvdtrain.collectives.compression import Compression
from hvdtrain.collectives.reduction import GradientReducer, Reduction, weighted
from hvdtrain.collectives.step_context import current_step
from hvdtrain.errors import EngineError, UsageError, require_integer
from hvdtrain.keras.fit import prepare_fit
from hvdtrain.keras.loss_scaling import correct_loss_scaling
from hvdtrain.keras_internals.corrections import correct, prepare_keras
from hvdtrain.keras_internals.optimizer_state import is_sharded
from hvdtrain.keras_internals.optimizers import (
    AppliesByKeras,
    inner_of,
    is_distributed,
    refuse_several,
    require_hooks,
)
from hvdtrain.keras_internals.overlay import overlay


class OptimizerReducer(GradientReducer):
    """Gradient reducer of one optimizer.

    Attributes:
        pending: Variables of the current update, because Keras calls `_clip_gradients` without them.
        reduced: Whether their gradients have been reduced.
        early: Whether they were reduced before the update; see `reduce_before`.
    """

    def __init__(self, reduction: Reduction) -> None:
        super().__init__(reduction)
        self.pending: list[Any] = []
        self.reduced = self.early = False

    def reduce(self, gradients: list[Any], optimizer: Any) -> list[Any]:
        """Return the gradients of the variables in `pending`, reduced over the ranks."""
        self.reduced = True
        positions = [optimizer._get_variable_index(v) for v in self.pending]
        return self(gradients, self.pending, positions, weighted=current_step() is not None)

    @property
    def holds_parts(self) -> bool:
        """Whether this rank has only parts of the reduced gradients, and cannot compute their norms by itself."""
        position = self.reduction.position
        return position is not None and not position.has_all

    def is_divided(self, variable: Any) -> bool:
        """Whether each rank of the process set has a part of the reduced gradient of `variable`."""
        return False

    def clip(self, gradients: list[Any], limit: float, together: bool) -> list[Any]:
        """Return the reduced gradients of `pending`, clipped by norm; see `clip_by_norm`. A collective."""
        position = self.reduction.position

        def parts(variable: Any) -> list[Communicator]:
            ranks = self._options_for(variable, False).process_set
            further = [] if position is None else list(position.parts(variable))
            # The norm of all gradients includes the local ones of all ranks: the clipped ones must stay equal.
            is_divided = self.is_divided(variable) or (together and self.is_local(variable))
            return [ranks, *further] if is_divided and ranks.includes_this() else further

        rest = [] if position is None else [position.pipeline_set]
        name = f"{self._name()}_norm"
        return clip_by_norm(gradients, self.pending, limit, together, parts, rest, name)


class _Distributed(AppliesByKeras):
    """Mixin that DistributedOptimizer adds to the wrapped optimizer's class."""

    hvdtrain_reduction: Reduction
    hvdtrain_reducer: OptimizerReducer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Called by from_config and copies; DistributedOptimizer itself replaces the class of an instance.
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "hvdtrain_reducer", OptimizerReducer(self.hvdtrain_reduction))

    def __reduce__(self) -> tuple[Any, ...]:
        # Keras pickles and copies through a file, which holds the plain optimizer: without this a
        # copy (copy.deepcopy) would silently not be distributed.
        _, arguments = super().__reduce__()  # type: ignore[str-unpack]
        make = keras.optimizers.Optimizer._unpickle_model
        return _made_distributed, (make, arguments, self.hvdtrain_reduction)

    @property
    def process_set(self) -> Communicator:
        """Ranks over which gradients are reduced."""
        return self.hvdtrain_reducer.reduction.process_set

    @property
    def local_variables(self) -> list[Any]:
        """Variables given to `register_local_var`."""
        return self.hvdtrain_reducer.local_variables

    def register_local_var(self, var: Any) -> None:
        """Keep `var` (a Keras variable or tf.Variable) to this rank: its gradients are not reduced."""
        self.hvdtrain_reducer.register_local(var)

    def build(self, variables: Any) -> None:
        variables = list(variables)
        super().build(variables)  # type: ignore[misc]
        self.hvdtrain_reducer.build(variables)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        if not pairs or not self._looks_first("apply_gradients"):
            return super().apply_gradients(pairs)  # type: ignore[misc]
        gradients, variables = zip(*pairs, strict=True)
        with self.reduce_before(gradients, variables) as reduced:
            return super().apply_gradients(list(zip(reduced, variables, strict=True)))  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        if not len(grads) or not self._looks_first("apply"):
            return super().apply(grads, trainable_variables)
        known = self._trainable_variables  # type: ignore[attr-defined]
        variables = list(known if trainable_variables is None else trainable_variables)
        with self.reduce_before(grads, variables) as reduced:
            # Skips the check in AppliesByKeras: the gradients are already reduced, so all ranks update alike.
            return super(AppliesByKeras, self).apply(reduced, variables)  # type: ignore[misc]

    def _looks_first(self, *methods: str) -> bool:
        """Whether the user's class overrides one of `methods`, and so must be given gradients that are reduced."""
        plain = super(AppliesByKeras, self)
        by_keras = all(
            getattr(plain, name).__func__ is getattr(keras.optimizers.Optimizer, name)
            for name in methods
        )
        reducer = self.hvdtrain_reducer
        return not (by_keras or reducer.early or reducer.holds_parts)

    @property
    def hvdtrain_accumulated(self) -> Reduction:
        """How the ranks' accumulators make those of one process; equal ones if gradients are reduced before."""
        reduction = self.hvdtrain_reducer.reduction
        reduced = self._looks_first("apply", "apply_gradients")
        return replace(reduction, weighted=False) if reduced else reduction

    def scale_loss(self, loss: Any) -> Any:
        step = current_step()
        return super().scale_loss(loss if step is None else step.weigh_loss(loss))  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        reducer = self.hvdtrain_reducer
        reducer.pending, reducer.reduced = list(trainable_variables), reducer.early
        # Weighted before they are accumulated, because the shares may differ between the steps of one update.
        grads = list(grads) if reducer.early else weighted(grads)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
        # With accumulation in eager mode only the boundary step reduces.
        if not reducer.reduced and not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            raise EngineError(
                f"Keras {keras.__version__} applied gradients without calling _clip_gradients: they were not "
                "reduced. hvdtrain was tested with Keras 3.15."
            )

    def _clip_gradients(self, grads: Any) -> Any:
        reducer = self.hvdtrain_reducer
        reduced = list(grads) if reducer.early else reducer.reduce(list(grads), self)
        limit, together = self.clipnorm or self.global_clipnorm, not self.clipnorm  # type: ignore[attr-defined]
        if limit and (reducer.holds_parts or (together and reducer.local_variables)):
            return reducer.clip(reduced, limit, together)
        return super()._clip_gradients(reduced)  # type: ignore[misc]

    @contextlib.contextmanager
    def reduce_before(self, grads: Any, variables: Any) -> Iterator[list[Any]]:
        """Reduce the gradients before the update; in this block the update does not reduce them again.

        For loss scaling in a step (so that the test for overflow is that of one process with the whole batch), and
        for optimizers that override `apply` and use the gradients there.
        """
        reducer = self.hvdtrain_reducer
        if not self.built:  # type: ignore[attr-defined]
            self.build(variables)
        summed = self.summed(grads, variables)
        reducer.early = True
        try:
            yield summed
        finally:
            reducer.early = False

    def summed(self, grads: Any, variables: Any) -> list[Any]:
        """Return this rank's gradients of a step, weighted by its share and summed over the ranks.

        Gradients that overwrite their variable are returned unchanged.
        """
        reducer = self.hvdtrain_reducer
        found = list(grads)
        added = [
            place
            for place, (gradient, variable) in enumerate(zip(grads, variables, strict=True))
            if gradient is not None and not getattr(variable, "overwrite_with_gradient", False)
        ]
        reducer.pending = [variables[place] for place in added]
        sums = reducer.reduce(weighted([found[place] for place in added]), self)
        for place, total in zip(added, sums, strict=True):
            found[place] = total
        reducer.pending = list(variables)
        return found

    def _overwrite_variables_directly_with_gradients(self, grads: Any, vars: Any) -> Any:
        # float8 scales are "gradients" that replace the variable: the maximum over the ranks is safe for all.
        reducer = self.hvdtrain_reducer
        grads = [
            reducer.combined(g, Max, f"overwrite_{self._get_variable_index(v)}")  # type: ignore[attr-defined]
            if g is not None and getattr(v, "overwrite_with_gradient", False)
            else g
            for g, v in zip(grads, vars, strict=True)
        ]
        return super()._overwrite_variables_directly_with_gradients(grads, vars)


def require_plain(optimizer: Any) -> keras.optimizers.Optimizer:
    """Return `optimizer`, or the one inside a LossScaleOptimizer, after checks that it can be made distributed.

    Raises:
        UsageError: If it is already distributed, is not a Keras optimizer, or is a MultiOptimizer.
        EngineError: If this version of Keras lacks a method that the reduction needs.
    """
    if is_distributed(optimizer):
        raise UsageError("The optimizer is already distributed: wrap it only once")
    inner = inner_of(optimizer)
    refuse_several(inner)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise UsageError(f"Expected a keras.optimizers.Optimizer, not {type(optimizer).__name__}")
    require_hooks(type(inner))
    return inner


def distribute(optimizer: Any, reduction: Reduction) -> Any:
    """Make a plain Keras optimizer, or the one inside a LossScaleOptimizer, reduce its gradients; return `optimizer`.

    Raises:
        UsageError: See `require_plain`.
        EngineError: See `require_plain`.
    """
    inner = require_plain(optimizer)
    correct(keras.Model, "__reduce__", _reduce_model)
    prepare_keras()
    correct_loss_scaling()
    prepare_fit()
    overlay(inner, _Distributed, hvdtrain_reduction=reduction)
    # Not through Keras's __setattr__, which would track (and save) the reducer's attributes.
    object.__setattr__(inner, "hvdtrain_reducer", OptimizerReducer(reduction))
    if inner.built:
        inner.hvdtrain_reducer.build(inner._trainable_variables)
    return optimizer


def _reduce_model(original: Callable[..., Any], self: keras.Model) -> tuple[Any, ...]:
    """Let copies of a compiled model be distributed, too: Keras makes them from a file, which names plain classes."""
    found = original(self)
    optimizer = getattr(self, "optimizer", None)
    if optimizer is None or not is_distributed(optimizer) or is_sharded(optimizer):
        return found
    return _made_distributed, (*found, inner_of(optimizer).hvdtrain_reduction)


def _made_distributed(make: Callable[..., Any], arguments: Any, reduction: Reduction) -> Any:
    """Return the optimizer, or the model, that Keras makes from a file, distributed."""
    made = make(*arguments)
    distribute(made.optimizer if isinstance(made, keras.Model) else made, reduction)
    return made


def undistribute(optimizer: Any) -> None:
    """Make an optimizer plain again, or the one inside a LossScaleOptimizer; it keeps its state."""
    inner = inner_of(optimizer)
    if is_distributed(inner):
        _, inner.__class__ = type(inner).__bases__
        del vars(inner)["hvdtrain_reducer"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: hvd.ProcessSet | Communicator | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer reduce its gradients over the ranks before it applies them.

    The optimizer is changed in place and returned; it remains an instance of its class.

    Args:
        optimizer: A keras.optimizers.Optimizer, or a LossScaleOptimizer around one.
        name: Part of the names of the collectives; the same on every rank.
        device_dense: Device for the reduction of dense gradients. Default: Horovod's choice.
        device_sparse: Device for the reduction of sparse gradients.
        compression: `Compression.none`, `.fp16`, `.bf16`, `.power_sgd(rank=4)` or `.top_k(fraction=0.01)`, or your own
            Horovod Compressor.
        sparse_as_dense: Reduce IndexedSlices (from embeddings) as dense tensors.
        gradient_predivide_factor: With op=Average, divide by this factor before the sum, and by size / factor after it.
        op: Average, Sum or Adasum (which needs MPI, and a number of ranks that is a power of two).
        backward_passes_per_step: Accumulate the gradients of this many batches before each reduction
            (gradient_accumulation_steps in Keras).
        average_aggregated_gradients: Divide the accumulated gradients by the number of batches.
        num_groups: Deprecated name of `groups`.
        groups: Number of groups to reduce the gradients in, or a list of groups (lists of variables). A variable in no
            group is reduced alone, and a group of more than 67,108,864 elements in parts. Default: gradients of fewer
            than 262,144 elements form groups of neighbours of up to 1,048,576. With op=Adasum, there are no groups, and
            what Compression.bf16, .power_sgd or .top_k compresses is alone.
        process_set: Ranks to reduce over. Default: all.
        scale_local_gradients: Divide the gradients of local variables by the number of ranks.

    Raises:
        UsageError: If an argument is invalid, or arguments exclude each other; if the optimizer is already distributed,
            is not a Keras optimizer, or is a MultiOptimizer.
    """
    inner = require_plain(optimizer)
    if num_groups:
        warnings.warn("num_groups has been renamed to groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    require_integer("backward_passes_per_step", backward_passes_per_step)
    summed = backward_passes_per_step > 1 and not average_aggregated_gradients
    reduction = Reduction(
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=ranks_of(process_set),
        scale_local_gradients=scale_local_gradients,
        postscale_factor=float(backward_passes_per_step) if summed else 1.0,
    )
    _accumulate(inner, backward_passes_per_step)
    return distribute(optimizer, reduction)


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let Keras accumulate the gradients of `passes` batches."""
    if passes == 1:
        return
    if optimizer.gradient_accumulation_steps == passes:
        return  # A saved optimizer keeps its accumulation.
    if optimizer.gradient_accumulation_steps:
        raise UsageError(
            f"backward_passes_per_step={passes}, but the optimizer has gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}: use only one of them"
        )
    if optimizer.built:
        raise UsageError("backward_passes_per_step: wrap the optimizer before it is built or used")
    optimizer.gradient_accumulation_steps = passes


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    groups: int | list[list[Any]] | None = None,
    process_set: hvd.ProcessSet | Communicator | None = None,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a DistributedOptimizer that does not reduce the gradients of `local_layers`.

    Other arguments as in DistributedOptimizer.

    Args:
        local_layers: A built Keras layer, or several.

    Raises:
        UsageError: If a local layer is not a Keras layer or is not built; also as in DistributedOptimizer.
    """
    layers = layers_of(local_layers)
    distributed = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            reducer_of(distributed).register_local(variable)
    return distributed


def reducer_of(optimizer: Any) -> OptimizerReducer:
    """Return the reducer of a distributed optimizer, or of the one inside a LossScaleOptimizer."""
    return inner_of(optimizer).hvdtrain_reducer


def layers_of(
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None,
) -> list[keras.layers.Layer]:
    """Return `local_layers` as a list of built layers.

    Raises:
        UsageError: If one of them is not a Keras layer, or is not built.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else local_layers or []
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise UsageError(f"local_layers: {layer!r} is not a keras.layers.Layer")
        if not layer.built:
            raise UsageError(
                f"local_layers: layer {layer.name!r} has no weights yet; build the model first"
            )
    return list(layers)
