"""Differentiable collectives, used by hvdtrain.keras.

The input of one rank affects the losses of all ranks. As in PyTorch, its gradient is that of the sum of their losses:
the gradient of a reduction is a reduction of the ranks' gradients, that of an allgather is the sum of all ranks'
gradients for this rank's rows, and that of a broadcast is the sum of all gradients, on the root. So
DistributedGradientTape, which averages over the ranks, gives the gradient of their mean loss with any collectives.

Horovod's registered gradients are not consistent with that, nor with each other: those of allgather and broadcast are
divided by the number of ranks, that of a reducescatter with Sum is multiplied by it, and those of Min, Max and Product
reduce the gradients by minimum, maximum and product.

A gradient is a collective, too: if one rank's loss depends on the result, every rank's loss must.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.collectives.anchoring import anchored
from hvdtrain.collectives.communicator import ranks_of, to_reducible
from hvdtrain.collectives.compression import BF16Compressor, Compression, bf16_sum
from hvdtrain.collectives.placement import device_dense
from hvdtrain.collectives.reduction import scaled
from hvdtrain.collectives.step_context import current_step, require_present
from hvdtrain.collectives.tensor_names import in_this_graph
from hvdtrain.errors import UsageError


@dataclass(frozen=True)
class Call:
    """Arguments of one collective.

    Attributes:
        name: Name of the collective, the same on all ranks.
        ranks: Ranks that take part.
        op: Operation of a reduction.
        prescale, postscale: Factors before and after a reduction.
        compression: Compression of a reduction.
    """

    name: str
    ranks: hvd.ProcessSet
    op: Any = hvd.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Any = Compression.none

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments common to all of Horovod's collectives."""
        require_present(ranks_of(self.ranks).ranks)
        return {"process_set": self.ranks, "ignore_name_scope": True}

    @property
    def scaling(self) -> dict[str, Any]:
        """Keyword arguments of Horovod's reductions."""
        factors = {"prescale_factor": self.prescale, "postscale_factor": self.postscale}
        plain = self.compression is BF16Compressor
        compression = Compression.none if plain else self.compression
        return {"op": self.op, "compression": compression, **factors}

    @property
    def factor(self) -> Any:
        """Factor for the sum over the ranks that gives the same result, with op Sum or Average; see `divide`."""
        factor = float(self.prescale * self.postscale)
        return ranks_of(self.ranks).divide(factor) if self.op == hvd.Average else factor

    def of_gradient(self) -> Call:
        """Return the call for the gradient, with a name for the graph in which it is computed."""
        return replace(self, name=in_this_graph(f"{self.name}_gradient", ranks_of(self.ranks)))


def allreduce(tensor: tf.Tensor, call: Call) -> tf.Tensor:
    """Return `tensor` reduced over the ranks.

    Raises:
        UsageError: From the backward pass: `op` is Adasum, which has no gradient.
    """

    def forward(wire: tf.Tensor) -> tf.Tensor:
        if call.compression is BF16Compressor and wire.dtype.is_floating:
            return bf16_sum(wire, call.name, ranks_of(call.ranks), call.factor)
        where = device_dense(wire)
        return hvd.allreduce(
            wire, name=call.name, **call.scaling, device_dense=where, **call.options
        )

    def backward(tensor: tf.Tensor, gradient: tf.Tensor, again: Call) -> tf.Tensor:
        if call.op in (hvd.Sum, hvd.Average):
            return allreduce(gradient, again)
        if call.op in _ELEMENTWISE:
            return _elementwise_gradient(tensor, gradient, again)
        raise UsageError("allreduce: op=Adasum has no gradient")

    return _differentiable(tensor, call, forward, backward)


def allgather(tensor: tf.Tensor, call: Call) -> tf.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension."""

    def forward(wire: tf.Tensor) -> tf.Tensor:
        return hvd.allgather(wire, name=call.name, **call.options)

    def backward(tensor: tf.Tensor, gradient: tf.Tensor, again: Call) -> tf.Tensor:
        own = tf.shape(tensor)
        rows = hvd.allgather(anchored(own[:1]), name=f"{again.name}_rows", **call.options)
        parts, _ = alltoall(gradient, rows, again)
        size = ranks_of(call.ranks).size_at_run()
        return tf.reduce_sum(tf.reshape(parts, tf.concat([[size], own], 0)), axis=0)

    return _differentiable(tensor, call, forward, backward)


def broadcast(tensor: tf.Tensor, root_rank: int, call: Call) -> tf.Tensor:
    """Return the `tensor` of rank `root_rank`."""

    def forward(wire: tf.Tensor) -> tf.Tensor:
        return hvd.broadcast(wire, root_rank, name=call.name, **call.options)

    def backward(tensor: tf.Tensor, gradient: tf.Tensor, again: Call) -> tf.Tensor:
        total = allreduce(gradient, again)
        # Not tf.zeros: TensorFlow would prune a collective whose result this rank does not use.
        mine = anchored(tf.equal(ranks_of(None).rank_at_run(), root_rank))
        return tf.math.multiply_no_nan(total, tf.cast(mine, total.dtype))

    return _differentiable(tensor, call, forward, backward)


def alltoall(tensor: tf.Tensor, splits: tf.Tensor, call: Call) -> tuple[tf.Tensor, tf.Tensor]:
    """Send `splits[r]` rows of `tensor` to each rank r; return the rows received, and their number from each rank."""
    received: list[tf.Tensor] = []

    def forward(wire: tf.Tensor) -> tf.Tensor:
        output, rows = hvd.alltoall(wire, splits, name=call.name, **call.options)
        received.append(rows)
        return output

    def backward(tensor: tf.Tensor, gradient: tf.Tensor, again: Call) -> tf.Tensor:
        back = alltoall(gradient, received[0], again)[0]
        # Rows that were not sent have a gradient of zero.
        return tf.concat([back, tf.zeros_like(tensor[tf.shape(back)[0] :])], 0)

    return _differentiable(tensor, call, forward, backward), received[0]


def reducescatter(tensor: tf.Tensor, call: Call) -> tf.Tensor:
    """Return this rank's rows of `tensor`, reduced over the ranks."""

    def forward(wire: tf.Tensor) -> tf.Tensor:
        where = device_dense(wire)
        return hvd.reducescatter(
            wire, name=call.name, **call.scaling, device_dense=where, **call.options
        )

    def backward(tensor: tf.Tensor, gradient: tf.Tensor, again: Call) -> tf.Tensor:
        return scaled(allgather(gradient, again), call.factor)

    return _differentiable(tensor, call, forward, backward)


def _differentiable(
    tensor: tf.Tensor,
    call: Call,
    forward: Callable[[tf.Tensor], tf.Tensor],
    backward: Callable[[tf.Tensor, tf.Tensor, Call], tf.Tensor],
) -> tf.Tensor:
    """Apply `forward` to `tensor`, converted to a wire dtype; `backward` computes its gradient."""

    @tf.custom_gradient
    def collective(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(gradient: tf.Tensor) -> tf.Tensor:
            # TensorFlow's zero gradient of an unused output is float32.
            own, step = tf.cast(gradient, tensor.dtype), current_step()
            if step is None or step.share_in_loss:
                return backward(tensor, own, call.of_gradient())
            # The optimizer multiplies the result by this rank's share: what others send must have theirs instead.
            share = tf.cast(step.share, own.dtype)
            weighted = tf.math.multiply_no_nan(own, share)
            return tf.math.divide_no_nan(backward(tensor, weighted, call.of_gradient()), share)

        return tf.cast(forward(to_reducible(tensor)), tensor.dtype), gradient

    return collective(tensor)


_ELEMENTWISE = {
    hvd.Min: tf.reduce_min,
    hvd.Max: tf.reduce_max,
    hvd.Product: tf.reduce_prod,
}


def _elementwise_gradient(tensor: tf.Tensor, gradient: tf.Tensor, call: Call) -> tf.Tensor:
    """Return the gradient of a minimum, maximum or product over the ranks: TensorFlow's, on the gathered values."""
    total = allreduce(gradient, replace(call, op=hvd.Sum, prescale=1.0, postscale=1.0))
    gathered = replace(call, name=f"{call.name}_values")
    everyone = allgather(tensor[tf.newaxis], gathered)
    with tf.GradientTape() as tape:
        tape.watch(everyone)
        result = _ELEMENTWISE[call.op](everyone * call.prescale, axis=0) * call.postscale
    return tape.gradient(result, everyone, total)[ranks_of(call.ranks).rank_at_run()]
