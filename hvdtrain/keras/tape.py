"""DistributedGradientTape: gradients averaged over the ranks, for custom training loops."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import Average, Communicator, ranks_of
from hvdtrain.collectives.compression import Compression
from hvdtrain.collectives.error_feedback import refuse_lossy
from hvdtrain.collectives.reduction import GradientReducer, Reduction
from hvdtrain.collectives.tensor_names import variables_name
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import layers_of
from hvdtrain.keras_internals.overlay import overlay
from hvdtrain.keras_internals.variables import identities, identity, mark_taped, tf_variable


class _DistributedTape:
    """Mixin that DistributedGradientTape adds to the wrapped tape's class."""

    hvdtrain_reducer: GradientReducer

    def register_local_source(self, source: Any) -> None:
        """Keep the gradients of `source` (a Keras variable or tf.Variable) on this rank."""
        self.hvdtrain_reducer.register_local(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the gradients of `target` with respect to `sources`, in their structure, reduced over the ranks."""
        del use_generic_names  # Names of collectives never depend on the variables' names here.
        flat = tf.nest.flatten(sources)
        gradients = super().gradient(  # type: ignore[misc]
            target, [tf_variable(s) for s in flat], output_gradients, unconnected_gradients
        )
        mark_taped(flat, self.hvdtrain_reducer)
        return tf.nest.pack_sequence_as(sources, self.hvdtrain_reducer(gradients, flat))

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UsageError: the result could not be averaged over the ranks."""
        raise _no_jacobian("jacobian")

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UsageError: the result could not be averaged over the ranks."""
        raise _no_jacobian("batch_jacobian")

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return the (source, gradient) pairs of the local sources, and those of the other sources."""
        del use_generic_names
        flat = tf.nest.flatten(sources)
        pairs = list(zip(flat, self.gradient(target, flat, output_gradients), strict=True))
        local = identities(self.hvdtrain_reducer.local_variables)
        return (
            [pair for pair in pairs if identity(pair[0]) in local],
            [pair for pair in pairs if identity(pair[0]) not in local],
        )


def _no_jacobian(method: str) -> UsageError:
    return UsageError(
        f"DistributedGradientTape.{method}: the rows of a Jacobian may be this rank's own examples, or quantities that "
        "all ranks have in common, and only the latter may be averaged. Record it with a plain tf.GradientTape, and "
        "where its rows mean the same on every rank, average it: hvdtrain.keras.allreduce(jacobian)"
    )


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: hvd.ProcessSet | Communicator | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make the `gradient` method of a tf.GradientTape return gradients that are reduced over the ranks.

    The tape is changed in place and returned, so it can be wrapped before or after its `with` block. Apply the
    gradients with a plain optimizer; a DistributedOptimizer would reduce them twice.

    Other arguments as in DistributedOptimizer.

    Args:
        gradtape: The tf.GradientTape.

    Raises:
        UsageError: `gradtape` is not a tf.GradientTape; an argument is invalid, or arguments exclude each other. The
            methods `jacobian` and `batch_jacobian` always raise it, because their results cannot be averaged.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise UsageError(f"Expected a tf.GradientTape, not {type(gradtape).__name__}")
    refuse_lossy(compression, "DistributedGradientTape")
    if num_groups:
        warnings.warn("num_groups has been renamed to groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    reduction = Reduction(
        name="tape",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=ranks_of(process_set),
        scale_local_gradients=scale_local_gradients,
    )
    overlay(gradtape, _DistributedTape)
    gradtape.hvdtrain_reducer = GradientReducer(reduction, variables_name)
    return gradtape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: hvd.ProcessSet | Communicator | None = None,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a DistributedGradientTape that does not reduce the gradients of `local_layers`.

    An optimizer that combines the gradients of all variables (`global_clipnorm`, LossScaleOptimizer) combines each
    rank's local ones with the reduced ones, and so scales the latter differently on each rank: use
    PartialDistributedOptimizer with these.

    Other arguments as in DistributedGradientTape.

    Args:
        local_layers: A built Keras layer, or several.

    Raises:
        UsageError: A local layer is not a Keras layer or not built; arguments exclude each other.
    """
    layers = layers_of(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
