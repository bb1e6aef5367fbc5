"""Base of the split layers: their group of ranks, the names of their collectives, and the split of their variables.

A Keras layer becomes a split layer in place, by a change of its class: its name, its place in the model, the paths of
its variables and its initial values remain those of the whole model. Files record the plain layer's class and its
whole size, so they load where nothing is split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.keras_internals.deferred_variables import deferred_variables_of, initialize, keep_part
from hvdtrain.keras_internals.overlay import adopt_names
from hvdtrain.keras_internals.shards import Shard
from hvdtrain.keras_internals.variables import variable_name
from hvdtrain.parallel.group_collectives import sum_parts

_numbers = itertools.count()


class SplitLayer:
    """Base of split layers, listed before the Keras layer class, whose name files get."""

    # Horovod's operations have no XLA kernels.
    supports_jit = False
    group: Communicator
    _collective: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        plain = next((one for one in cls.__mro__ if one.__module__.startswith("keras.")), None)
        if plain is not None:
            adopt_names(cls, plain)

    def __init__(self, *args: Any, group: Communicator, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_group(group)

    @property
    def collective(self) -> str:
        """Prefix of the names of this layer's collectives: numbered by first use, the same on all ranks."""
        if self._collective is None:
            object.__setattr__(self, "_collective", f"hvdtrain_tensor_{next(_numbers)}")
        assert self._collective is not None
        return self._collective

    def set_group(self, group: Communicator) -> None:
        """Set the group of ranks that split this layer."""
        object.__setattr__(self, "group", group)
        self.supports_jit = False

    def split(self) -> None:
        """Keep only this rank's parts of the variables of a built layer."""
        raise NotImplementedError

    def save_own_variables(self, store: Any) -> None:
        """Raise an error: a file of one rank's parts would pass for the whole model.

        Raises:
            UsageError: Always.
        """
        del store
        raise UsageError(
            f"Layer {self.name!r} is split over ranks, and this rank has only its part: save the whole model on all "  # type: ignore[attr-defined]
            "ranks together, with Trainer.save or run_dir, instead of model.save or a callback that saves"
        )

    @property
    def kernel(self) -> Any:
        """Raise UsageError: code that reads a layer's weights (to tie them to another layer's) needs all of them."""
        raise UsageError(
            f"Layer {self.name!r} is split over ranks, and no rank holds its whole weights: leave "  # type: ignore[attr-defined]
            "it out of the layout's split if other code reads them. This rank's part is in the "
            "layer's `variables`"
        )

    embeddings = kernel

    def _cut(self, variable: Any, axis: int) -> None:
        """Keep this rank's part of `variable` along `axis`; does nothing for None."""
        if variable is not None:
            split_variable(variable, axis, self.group, self.collective)


class PartDropout(SplitLayer, keras.layers.Dropout):
    """Dropout whose input is one part, along `split_axis`, of a larger activation.

    Every rank draws the whole mask from the same seed and uses its part, so that the mask equals that of the unsplit
    model and differs between the parts.
    """

    split_axis = -1

    def split(self) -> None:
        """Do nothing: dropout has no weights, and its seed is not split."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training or self.rate == 0:
            return inputs
        parts, axis = self.group.size(), self.split_axis % inputs.shape.rank
        whole = tf.concat(
            [
                tf.shape(inputs)[:axis],
                tf.shape(inputs)[axis : axis + 1] * parts,
                tf.shape(inputs)[axis + 1 :],
            ],
            axis=0,
        )
        mask = keras.random.dropout(
            tf.ones(whole, inputs.dtype), self.rate, seed=self.seed_generator
        )
        return inputs * tf.split(mask, parts, axis=axis)[self.group.rank()]


@contextmanager
def built_in_parts(layer: Any) -> Iterator[None]:
    """Context in which Keras builds a split layer that was made by hand: only the values of the parts are made."""
    with deferred_variables_of(least=0) as waiting:
        yield
    layer.split()
    for variable in waiting:
        initialize(variable)


def split_variable(variable: Any, axis: int, group: Communicator, name: str) -> None:
    """Keep this rank's part of a Keras variable; its regularizer and constraint still apply to the whole variable.

    Raises:
        UsageError: The size is not a multiple of the number of ranks, or the variable has a regularizer or constraint
            that needs the whole variable.
    """
    size, parts = int(variable.shape[axis]), group.size()
    if size % parts:
        raise UsageError(
            f"Variable {variable_name(variable)!r} of shape {tuple(variable.shape)} cannot be split over {parts} "
            f"ranks along dimension {axis}: {size} is not a multiple of {parts}. Change the "
            "layer's size or the mesh"
        )
    _check_constraint(variable, axis)
    if variable.regularizer is not None:
        variable.regularizer = SummedPenalty(variable, group, name)
    keep_part(variable, Shard(axis, group.rank(), parts))


class SummedPenalty(keras.regularizers.Regularizer):
    """Regularizer of a split variable: the penalties of its parts, summed over the ranks.

    Raises:
        UsageError: The variable's own regularizer is not L1, L2 or L1L2.
    """

    def __init__(self, variable: Any, group: Communicator, name: str) -> None:
        plain = variable.regularizer
        if type(plain) not in (
            keras.regularizers.L1,
            keras.regularizers.L2,
            keras.regularizers.L1L2,
        ):
            raise UsageError(
                f"Variable {variable_name(variable)!r} cannot be split: its regularizer {type(plain).__name__} may "
                "not be a sum over the elements. L1, L2 and L1L2 can be split"
            )
        self._plain = plain
        self._group = group
        self._name = f"{name}_{variable.name}_penalty"

    def __call__(self, x: Any) -> Any:
        return sum_parts(keras.ops.convert_to_tensor(self._plain(x)), self._group, self._name)

    def get_config(self) -> dict[str, Any]:
        return self._plain.get_config()


def _check_constraint(variable: Any, axis: int) -> None:
    constraint = variable.constraint
    if constraint is None or type(constraint) is keras.constraints.NonNeg:
        return
    norms = (
        keras.constraints.MaxNorm,
        keras.constraints.UnitNorm,
        keras.constraints.MinMaxNorm,
    )
    if type(constraint) in norms:
        over = constraint.axis if isinstance(constraint.axis, list | tuple) else [constraint.axis]
        if axis not in [a % len(variable.shape) for a in over if a is not None]:
            return
    raise UsageError(
        f"Variable {variable_name(variable)!r} cannot be split along dimension {axis}: its constraint "
        f"{type(constraint).__name__} needs all of that dimension. Split the layer the other way, or leave one out"
    )
