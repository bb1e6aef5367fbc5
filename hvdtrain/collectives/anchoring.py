"""Inputs of collectives that TensorFlow cannot fold into constants.

TensorFlow takes Horovod's operations for pure functions: in a tf.function, the allreduce of a constant would be
computed only once, during graph optimization. So the input of a collective is made to depend on a variable.
(TensorFlow sees through PlaceholderWithDefault.)
"""

from __future__ import annotations

import functools

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvdtrain.errors import UsageError


def anchored(tensor: tf.Tensor) -> tf.Tensor:
    """Return `tensor` in a form that no graph optimizer takes for a constant.

    It is sliced from an index that a variable holds, which is 0: nothing is copied, and the value of a variable is
    known only when a step runs.

    Raises:
        UsageError: XLA compiles the whole function (jit_compile=True).
    """
    if tf.executing_eagerly():
        return tensor
    _require_no_xla()
    if not tensor.shape.rank:
        # A scalar has no dimension to slice; with an unknown rank their number is unknown.
        return tf.reshape(anchored(tf.reshape(tensor, [-1])), tf.shape(tensor))
    rank = tensor.shape.rank
    with tf.device(None):  # The device of the variable, not that of the tensor.
        begin = tf.raw_ops.ReadVariableOp(resource=_origin(rank), dtype=tf.int32)
    result = tf.slice(tensor, begin, [-1] * rank)
    result.set_shape(tensor.shape)
    return result


def _require_no_xla() -> None:
    """Raise UsageError in a function that XLA compiles as a whole: XLA cannot compile Horovod's operations."""
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
    """Return the handle of a variable of `rank` zeros, shared by all graphs of this process.

    A tf.Variable could not be created after the first call of a tf.function.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.int32, shape=[rank], shared_name=f"hvdtrain_origin_{rank}"
        )
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([rank], tf.int32))
    return handle
