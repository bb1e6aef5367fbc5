"""Inputs of collectives that no graph optimiser computes ahead.

TensorFlow takes Horovod's operations for pure functions: in a tf.function the "allreduce" of a constant would be
computed once and for all. So a collective's input is made to depend on a variable. (TensorFlow sees through
PlaceholderWithDefault.)
"""

from __future__ import annotations

import functools

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvdtrain.errors import UsageError


def anchored(tensor: tf.Tensor) -> tf.Tensor:
    """Return `tensor` as something that no graph optimiser takes for a constant.

    It is cut from the place on that a variable holds, which is 0: nothing is copied, and only a running step
    can know what a variable holds.

    Raises:
        UsageError: XLA compiles the function as a whole.
    """
    if tf.executing_eagerly():
        return tensor
    _require_no_xla()
    if not tensor.shape.rank:
        # A scalar has no place to cut at; an unknown rank no number of places.
        return tf.reshape(anchored(tf.reshape(tensor, [-1])), tf.shape(tensor))
    rank = tensor.shape.rank
    with tf.device(None):  # It is where the variable is, not where the tensor is.
        begin = tf.raw_ops.ReadVariableOp(resource=_origin(rank), dtype=tf.int32)
    result = tf.slice(tensor, begin, [-1] * rank)
    result.set_shape(tensor.shape)
    return result


def _require_no_xla() -> None:
    """Raise UsageError in a function that XLA compiles as a whole: none of its operations can be Horovod's."""
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(
            "A function with jit_compile=True communicates (DistributedGradientTape, DistributedOptimizer or a "
            "collective of hvdtrain.keras), and XLA cannot compile Horovod's operations: remove "
            "jit_compile=True from this tf.function. Put what XLA should compile into a separate "
            "tf.function(jit_compile=True) without collectives, or under `with "
            "tf.xla.experimental.jit_scope():`, which leaves them out"
        )


@functools.cache
def _origin(rank: int) -> tf.Tensor:
    """The handle of a variable that holds `rank` zeros, for all graphs of this process.

    A tf.Variable cannot be made in the later calls of a tf.function.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.int32, shape=[rank], shared_name=f"hvdtrain_origin_{rank}"
        )
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([rank], tf.int32))
    return handle
