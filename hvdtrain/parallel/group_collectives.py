"""Differentiable communication between the ranks that split a layer (Megatron-LM, Shoeybi et al. 2019).

Every rank of a group computes the same loss from the same activations. A "part" is a tensor that differs between the
ranks: a slice, or a term of a sum. The backward pass of each function is the transpose of its forward pass, so the
gradient of a whole activation is whole and equal on all ranks, and the gradient of a part belongs to that part alone:

    function          forward                    backward
    copy_to_parts     the same tensor            sum over the ranks            (Megatron's f)
    sum_parts         sum over the ranks         the same gradient             (Megatron's g)
    gather_parts      parts side by side         this rank's part
    take_part         this rank's part           parts side by side

Horovod's own gradients do not fit: their names depend on the local tensor, and some are scaled by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.communicator import Communicator


def copy_to_parts(tensor: tf.Tensor, group: Communicator, name: str) -> tf.Tensor:
    """Return `tensor`, which is equal on all ranks, as input to split layers; sums its gradients over the ranks."""
    return _pair(tensor, group, _same, _summed, f"{name}_copy")


def sum_parts(tensor: tf.Tensor, group: Communicator, name: str) -> tf.Tensor:
    """Return the sum of the ranks' tensors, equal on all ranks."""
    return _pair(tensor, group, _summed, _same, f"{name}_sum")


def gather_parts(tensor: tf.Tensor, group: Communicator, name: str, axis: int = -1) -> tf.Tensor:
    """Return the ranks' parts concatenated along `axis`, equal on all ranks."""
    return _pair(tensor, group, _gather_along(axis), _take_along(axis), f"{name}_gather")


def take_part(tensor: tf.Tensor, group: Communicator, name: str, axis: int = -1) -> tf.Tensor:
    """Return this rank's part along `axis` of a tensor that is equal on all ranks."""
    return _pair(tensor, group, _take_along(axis), _gather_along(axis), f"{name}_take")


Communicate = Callable[[tf.Tensor, Communicator, str], tf.Tensor]


def _pair(
    tensor: tf.Tensor, group: Communicator, forward: Communicate, backward: Communicate, name: str
) -> tf.Tensor:
    """Apply `forward`, with `backward` as its gradient."""
    if group.size() == 1:
        return tensor

    @tf.custom_gradient
    def function(x: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # The gradient of a lookup arrives as tf.IndexedSlices.
            whole = tf.convert_to_tensor(upstream)
            return backward(whole, group, f"{name}_gradient")

        return forward(x, group, name), gradient

    return function(tensor)


def _same(tensor: tf.Tensor, group: Communicator, name: str) -> tf.Tensor:
    del group, name
    return tf.identity(tensor)


def _summed(tensor: tf.Tensor, group: Communicator, name: str) -> tf.Tensor:
    return group.allreduce(tensor, name)


def _gather_along(axis: int) -> Communicate:
    def gather(tensor: tf.Tensor, group: Communicator, name: str) -> tf.Tensor:
        place = axis % tensor.shape.rank
        gathered = group.allgather(tensor[tf.newaxis], name)
        gathered.set_shape([group.size(), *tensor.shape])
        return tf.concat(tf.unstack(gathered), axis=place)

    return gather


def _take_along(axis: int) -> Communicate:
    def take(tensor: tf.Tensor, group: Communicator, name: str) -> tf.Tensor:
        del name
        return tf.split(tensor, group.size(), axis=axis)[group.rank()]

    return take
