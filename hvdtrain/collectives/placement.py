"""Where collectives run: on the tensor's device, unless the caller names another.

In eager mode TensorFlow takes tf.device("") for the first CPU, and Horovod enters its `device_dense`, which is "" by
default: the reduction of a GPU's tensor would be copied to main memory and go over MPI or Gloo in place of NCCL. In a
tf.function, tf.device("") changes nothing.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf
from tensorflow.python.eager import context


def on_device(name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which operations run on a device.

    Args:
        name: Name of the device, as for tf.device; "": operations run where they would without the context.
    """
    return tf.device(name) if name else contextlib.nullcontext()


def device_dense(tensor: tf.Tensor) -> str:
    """Return Horovod's argument `device_dense` for a reduction.

    Args:
        tensor: Tensor to reduce.
    """
    if tf.executing_eagerly() and not context.context().device_name:
        return str(tensor.device)
    return ""  # In a tf.function, or inside of tf.device(...): there, the caller has chosen.
