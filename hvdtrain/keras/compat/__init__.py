"""What hvdtrain needs of Keras's inside, except single attributes that a room reads itself. Tested with Keras 3.15.

Here is what training with Horovod needs; `variables` (that wait for their values), `graph` (of layers), `replicas`
(steps as pure functions), `remote` (variables on servers), `state` and `files` serve the other ways. Here:

`adopt_names`   a subclass that is saved under its parent's name;
`OPTIMIZER_HOOKS` the methods that DistributedOptimizer overrides;
`AppliesByKeras` optimizers whose own `apply`, if they have one, must lead to Keras's;
`own_non_trainable_variables`, `optimizer_slots`, `accumulators`, `velocities`: which variable is what;
`prepare_keras` corrections of Keras classes, for models whose optimizer is distributed only:
    LossScaleOptimizer agrees over the ranks whether gradients are finite, and a model that is to be
    compiled by XLA keeps Horovod's operations, which have no XLA kernel, outside the compiled part.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras.src import api_export, backend
from keras.src.backend import get_keras_mask
from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group
from keras.src.losses.loss import apply_mask
from keras.src.saving import object_registration

from hvdtrain.errors import EngineError, UsageError

OPTIMIZER_HOOKS = ("_backend_apply_gradients", "_clip_gradients", "_get_variable_index")


def require_hooks(optimizer_class: type) -> None:
    """Raise EngineError if this Keras no longer has the methods that the reduction hooks into."""
    missing = [name for name in OPTIMIZER_HOOKS if not hasattr(optimizer_class, name)]
    if missing:
        raise EngineError(
            f"Keras {keras.__version__} has no {missing[0]} in {optimizer_class.__name__}: gradients could not "
            "be reduced. hvdtrain was tested with Keras 3.15: install that, or wrap a keras.optimizers.Optimizer."
        )


def refuse_several(optimizer: Any) -> None:
    """Raise UsageError for Keras's MultiOptimizer, which leaves all work to optimizers inside it."""
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise UsageError(
            "MultiOptimizer hands the gradients to other optimizers, past the place where the workers' gradients are "
            "added up: give one optimizer for all weights; or, in a loop of your own, keep MultiOptimizer plain and "
            "take the gradients from hvdtrain.keras.DistributedGradientTape"
        )


class AppliesByKeras:
    """Lies over an optimizer whose update is made inside Keras's `apply`: one of its own must lead there.

    (A wrapper of another optimizer may apply the gradients by that one, and several workers' would never meet.)
    """

    hvdtrain_applied = 0
    """How often Keras's `apply` was reached."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        before = self.hvdtrain_applied
        result = super().apply(grads, trainable_variables)  # type: ignore[misc]
        if self.hvdtrain_applied == before and any(g is not None for g in grads):
            raise UsageError(
                f"The optimizer {type(self).__name__} has an apply of its own, which does not pass the gradients on to "
                "keras.optimizers.Optimizer.apply, where those of all workers become one update: let it call "
                "super().apply(grads, trainable_variables), or give the optimizer that it holds instead"
            )
        return result

    def _overwrite_variables_directly_with_gradients(self, grads: Any, vars: Any) -> Any:
        # Keras's apply calls this for any gradient.
        object.__setattr__(self, "hvdtrain_applied", self.hvdtrain_applied + 1)
        return super()._overwrite_variables_directly_with_gradients(grads, vars)  # type: ignore[misc]


def adopt_names(subclass: type, parent: type) -> None:
    """Make Keras save instances of `subclass` as `parent`, so that files load without hvdtrain."""
    subclass.__module__ = parent.__module__
    subclass.__qualname__ = parent.__qualname__
    exported = api_export.get_name_from_symbol(parent)
    if exported is not None:
        api_export.REGISTERED_OBJS_TO_NAMES[subclass] = exported
    registered = object_registration.GLOBAL_CUSTOM_NAMES.get(parent)
    if registered is not None:
        object_registration.GLOBAL_CUSTOM_NAMES[subclass] = registered


def inner_of(optimizer: Any) -> Any:
    """Return the optimizer inside a LossScaleOptimizer, or `optimizer` itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def is_built(model: keras.Model) -> bool:
    """Whether the model and all its layers have their variables."""
    return all(layer.built for layer in model._flatten_layers())


def own_non_trainable_variables(model: keras.Model) -> list[Any]:
    """Return the variables that were made non-trainable, without weights that were frozen later."""
    return [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]


def optimizer_slots(optimizer: Any) -> list[tuple[Any, list[Any]]]:
    """Return each trained variable with the optimizer's state for it: momenta, averages, accumulators."""
    inner = inner_of(optimizer)
    trained = list(getattr(inner, "_trainable_variables", ()))
    lists = [
        value
        for name, value in vars(inner).items()
        if name not in ("_variables", "_trainable_variables")
        and isinstance(value, list)
        and len(value) == len(trained)
        and all(slot is None or isinstance(slot, keras.Variable) for slot in value)
    ]
    return [
        (variable, [slots[i] for slots in lists if slots[i] is not None])
        for i, variable in enumerate(trained)
    ]


def accumulators(optimizer: Any) -> list[Any]:
    """Return the sums of gradients that wait for the next update: each rank has its own."""
    inner = inner_of(optimizer)
    return [v for v in getattr(inner, "_accumulated_gradients", None) or () if v is not None]


def optimizer_values_in_hdf5(path: str) -> list[Any]:
    """Return the optimizer state in a model's .h5 file, in the order of `optimizer.variables`; [] if none."""
    with h5py.File(path, "r") as file:
        if "optimizer_weights" not in file:
            return []
        return [np.array(value) for value in load_optimizer_weights_from_hdf5_group(file)]


def velocities(optimizer: Any) -> list[Any] | None:
    """Return the momenta v = m v - lr g of an optimizer, [] if it has none, None if that is not known.

    Muon's and Adam's momenta hold gradients, not steps.
    """
    inner = inner_of(optimizer)
    if isinstance(inner, keras.optimizers.SGD):
        return list(inner.momentums)
    if isinstance(inner, keras.optimizers.RMSprop):
        return list(inner._momentums)
    known = not getattr(inner, "momentum", 0) or isinstance(inner, keras.optimizers.Muon)
    return [] if known else None


def is_distributed(optimizer: Any) -> bool:
    """Whether DistributedOptimizer made this optimizer, or a loss-scaling one around or inside it."""
    return hasattr(optimizer, "hvdtrain_reducer") or hasattr(
        getattr(optimizer, "inner_optimizer", None), "hvdtrain_reducer"
    )


def prepare_keras() -> None:
    """Install the corrections; calling again changes nothing."""
    correct(keras.optimizers.LossScaleOptimizer, "check_finite", _check_finite)
    correct(keras.optimizers.LossScaleOptimizer, "scale_loss", _scale_loss)
    correct(keras.Model, "make_train_function", _make_train_function)


def correct(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let `replacement(original, self, ...)` stand in for a method of `owner`; calling again changes nothing."""
    original = getattr(owner, name)
    if getattr(original, "hvdtrain_corrected", False):
        return

    @functools.wraps(original)
    def corrected(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    corrected.hvdtrain_corrected = True  # type: ignore[attr-defined]
    setattr(owner, name, corrected)


def _check_finite(original: Callable[..., Any], self: Any, grads: Any) -> Any:
    """All ranks skip the step if one has an inf or nan; else the others would wait for it for ever."""
    finite = original(self, grads)
    reducer = getattr(self.inner_optimizer, "hvdtrain_reducer", None)
    if reducer is None:
        return finite
    vote = reducer.extreme(tf.cast(finite, tf.int32), hvd.Min, "finite", everyone=True)
    return tf.cast(vote, tf.bool)


def _scale_loss(original: Callable[..., Any], self: Any, loss: Any) -> Any:
    """Keras's loss scaling does not pass the loss on to the optimizer inside it."""
    reducer = getattr(self.inner_optimizer, "hvdtrain_reducer", None)
    return original(self, loss if reducer is None else reducer.weigh_loss(loss))


def _make_train_function(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    if not (is_distributed(self.optimizer) and self.jit_compile):
        return original(self, force)
    if self.train_function is not None and not force:
        return self.train_function
    self.jit_compile = False
    try:
        self.train_function = self._make_function(split_train_step(self))
    finally:
        self.jit_compile = True
    return self.train_function


def split_train_step(model: keras.Model) -> Callable[[Any], Any]:
    """Return model.train_step in two parts: forward and backward compiled by XLA, reduction and update not.

    While XLA's part is traced, the optimizer hands the gradients out instead of applying them. Works for a
    user's own train_step too, if it applies gradients once.
    """
    optimizer = model.optimizer
    handed_out: list[tuple[Any, Any]] = []

    @tf.function(jit_compile=True, autograph=False)
    def forward_and_backward(data: Any) -> Any:
        handed_out.clear()

        def take(pairs: list[tuple[Any, Any]]) -> bool:
            handed_out.extend((g, v) for g, v in pairs if g is not None)
            return True

        with gradients_taken(optimizer, take):
            logs = model.train_step(data)
        require_gradients(model, handed_out)
        return logs, [gradient for gradient, _ in handed_out]

    def train_step(data: Any) -> Any:
        logs, gradients = forward_and_backward(data)
        variables = [variable for _, variable in handed_out]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return logs

    return train_step


@contextlib.contextmanager
def gradients_taken(
    optimizer: Any, take: Callable[[list[tuple[Any, Any]]], bool]
) -> Iterator[None]:
    """Inside, `take` gets the (gradient, variable) pairs that `optimizer` is told to apply, whichever way.

    It returns whether it took them; else the optimizer applies them.
    """

    def apply_gradients(grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        return None if take(pairs) else type(optimizer).apply_gradients(optimizer, pairs)

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        known = optimizer._trainable_variables
        variables = known if trainable_variables is None else trainable_variables
        taken = take(list(zip(grads, variables, strict=True)))
        return None if taken else type(optimizer).apply(optimizer, grads, trainable_variables)

    object.__setattr__(optimizer, "apply_gradients", apply_gradients)
    object.__setattr__(optimizer, "apply", apply)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "apply_gradients")
        object.__delattr__(optimizer, "apply")


def require_gradients(model: keras.Model, handed_out: list[tuple[Any, Any]]) -> None:
    """Raise UsageError if the train_step of a model with weights to train has handed out no gradient."""
    if model.trainable_variables and not handed_out:
        raise UsageError(
            f"The train_step of {type(model).__name__} gave self.optimizer no gradient, so there is nothing to add up "
            "over the workers: let it call self.optimizer.apply(gradients, self.trainable_variables)"
        )


def symbolic_build(model: keras.Model, data: tuple[Any, ...]) -> None:
    """Create all variables of a compiled model, its metrics and its optimizer from the shapes of `data`."""
    model._symbolic_build(data_batch=data)


def symbolic_call(model: keras.Model, x: Any) -> Any:
    """Return the symbolic outputs of `model` for symbolic inputs; an unbuilt model is built."""
    return backend.compute_output_spec(model, x, training=False)


def compile_config(model: keras.Model) -> dict[str, Any]:
    """Return the arguments with which a model was compiled, except the optimizer; {} if it was not."""
    return dict(model._compile_config.config) if model.compiled and model._compile_config else {}


def compile_alike(model: keras.Model, other: keras.Model) -> None:
    """Compile `model` with the optimizer, losses and metrics that `other` was compiled with, if it was."""
    if other.compiled:
        model.compile(**compile_config(other) | {"optimizer": other.optimizer})


def compiled_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Return the Loss objects of a compiled and built model, each once."""
    compiled = getattr(model, "_compile_loss", None)
    found = [entry.loss for entry in (compiled._flat_losses or [])] if compiled else []
    return list({id(loss): loss for loss in found if isinstance(loss, keras.losses.Loss)}.values())


def mask_in_loss(y_pred: Any, own_mask: Any) -> Any:
    """Return which entries count in a loss: by the mask of `y_pred` and that of the values it found; None: all."""
    masks = [mask for mask in (get_keras_mask(y_pred), own_mask) if mask is not None]
    return functools.reduce(operator.and_, masks) if masks else None


def loss_weights(loss: keras.losses.Loss, mask: Any, sample_weight: Any) -> tf.Tensor | None:
    """Return the entries whose sum `loss` divides by, where that is not the number of entries; else None."""
    if loss.reduction == "mean_with_sample_weight":
        if mask is None and sample_weight is None:
            return None
        weights = None if sample_weight is None else tf.cast(sample_weight, loss.dtype)
        return apply_mask(weights, mask, dtype=loss.dtype, reduction=loss.reduction)
    return None if mask is None else tf.cast(mask, tf.float32)


def needs_whole_batch(model: keras.Model) -> str | None:
    """Return what is to be said of a loss of Keras's that parts of a batch cannot make; None if there is none."""
    for loss in compiled_losses(model):
        function = getattr(loss, "fn", None)
        if function is keras.losses.circle:
            return (
                f"The loss {loss.name!r} compares every example with all others of the batch, and a worker has only "
                "its share of them: train on one worker"
            )
        if function in (keras.losses.dice, keras.losses.tversky):
            axis = loss._fn_kwargs.get("axis")
            if axis is None or 0 in np.atleast_1d(axis):
                return (
                    f"The loss {loss.name!r} is made from sums over all examples of the batch, and a worker has only "
                    "its share of them: give it an axis without the first one, such as axis=(1, 2, 3) for images, so "
                    "that there is a value for each example; or train on one worker"
                )
    return None


def overrides(callback: keras.callbacks.Callback, method: str) -> bool:
    """Whether `callback` does something of its own in `method`."""
    return not getattr(getattr(callback, method), "_is_default", False)


def overridden(model: keras.Model, *methods: str) -> str | None:
    """Return the first of `methods` that the model's class writes anew; None if it has Keras's."""
    return next(
        (m for m in methods if getattr(type(model), m) is not getattr(keras.Model, m)), None
    )


def trains_by_keras(model: keras.Model) -> bool:
    """Whether Keras's train_step trains the model: it passes the loss through optimizer.scale_loss once."""
    return overridden(model, "train_step") is None


def has_loss(model: keras.Model) -> bool:
    """Whether a compiled model can compute a loss: from compile, its own methods, or add_loss."""
    own = overridden(model, "train_step", "compute_loss") is not None
    return own or model._compile_loss is not None or bool(model.losses)


def metric_names(model: keras.Model) -> list[str]:
    """Return the names under which a built model's losses and metrics stand in the logs."""
    return list(model.get_metrics_result())


def metrics_or_logs(model: keras.Model, logs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the logs of an epoch, and whether they are the results of the model's metrics.

    A train_step of the user's may return other names; then `logs`, of the last step, is all there is.
    """
    results = model.get_metrics_result()
    if not logs or set(logs) == set(results):
        return results, True
    return logs, False


def children(owner: Any) -> list[Any]:
    """Return the layers directly in a layer or model, in its order."""
    return list(owner._flatten_layers(include_self=False, recursive=False))
