"""LARS, an optimizer for very large batches. (LAMB, its relative for Adam, is Keras's own: `keras.optimizers.Lamb`.)"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError


@keras.saving.register_keras_serializable(package="hvdtrain")
class LARS(keras.optimizers.SGD):
    """SGD with momentum whose rate is scaled for each variable (You, Gitman and Ginsburg 2017, arXiv:1708.03888).

    No variable changes by more than a small part of itself in a step, however large the batch and the rate are. For a
    variable w with gradient g:

        rate = learning_rate * trust_coefficient * |w| / (|g| + weight_decay * |w|)
        velocity = momentum * velocity - rate * (g + weight_decay * w)
        w = w + velocity

    Vectors and scalars, such as biases and the weights of normalization layers, take the step of SGD at learning_rate,
    without decay. MLPerf and SimCLR do so too. In a network without normalization layers, which does not bear steps of
    such size, a small learning_rate with a large trust_coefficient (0.3 and 0.05) lets the matrices learn as fast.

    The norms are those of whole variables, so LARS does not train variables that are split (ZeRO, tensor parallelism).

    Args:
        learning_rate: A number, a schedule or a callable.
        momentum: Factor of the velocity in each step.
        weight_decay: Factor of the weights that is added to the gradient, before the rate is scaled.
        trust_coefficient: Largest change of a variable in a step with rate 1, as a fraction of its norm.
        name: Name of the optimizer.
        kwargs: Other arguments of keras.optimizers.SGD, except `nesterov`.

    Raises:
        UsageError: `momentum`, `weight_decay` or `trust_coefficient` is out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        name: str = "lars",
        **kwargs: Any,
    ) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(f"LARS: momentum must be at least 0 and less than 1, not {momentum}")
        if not 0 <= weight_decay < float("inf"):
            raise UsageError(f"LARS: weight_decay must be at least 0, not {weight_decay}")
        if not 0 < trust_coefficient < float("inf"):
            raise UsageError(f"LARS: trust_coefficient must be positive, not {trust_coefficient}")
        # Keras's own weight decay is a step of its own, which the rate for each variable would not know.
        super().__init__(learning_rate, momentum, weight_decay=None, name=name, **kwargs)
        self.gradient_decay = weight_decay
        self.trust_coefficient = trust_coefficient

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        rate = tf.cast(learning_rate, variable.dtype)
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        if len(variable.shape) > 1:
            decay = self.gradient_decay if self._use_weight_decay(variable) else 0.0
            weight, slope = tf.norm(variable), tf.norm(gradient)
            ratio = self.trust_coefficient * weight / (slope + decay * weight)
            # A variable of zeros could never leave them; without a gradient, the ratio may be infinite.
            rate *= tf.where((weight > 0) & (slope > 0), ratio, 1.0)
            gradient += decay * variable
        if not self.momentum:
            self.assign_sub(variable, rate * gradient)
            return
        velocity = self.momentums[self._get_variable_index(variable)]
        self.assign(velocity, self.momentum * velocity - rate * gradient)
        self.assign_add(variable, velocity)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["nesterov"]
        return config | {
            "weight_decay": self.gradient_decay,
            "trust_coefficient": self.trust_coefficient,
        }
