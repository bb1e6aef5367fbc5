"""Settings that TensorFlow takes only before it starts: it has started when an adopted script begins."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from hvdtrain.adopt.notes import Tell

_SETTERS = (
    (tf.config, "set_visible_devices"),
    (tf.config, "set_logical_device_configuration"),
    (tf.config.experimental, "set_visible_devices"),
    (tf.config.experimental, "set_memory_growth"),
    (tf.config.experimental, "set_virtual_device_configuration"),
    (tf.config.threading, "set_inter_op_parallelism_threads"),
    (tf.config.threading, "set_intra_op_parallelism_threads"),
)


@contextlib.contextmanager
def late_settings_left_out(tell: Tell) -> Iterator[None]:
    """In this block, leave out settings that come too late: which devices and threads a worker has, the launcher says.

    Args:
        tell: Told of each that is left out.
    """
    with contextlib.ExitStack() as blocks:
        for module, name in _SETTERS:
            setter = _lenient(getattr(module, name), tell)
            blocks.enter_context(mock.patch.object(module, name, setter))
        yield


def _lenient(setter: Callable[..., None], tell: Tell) -> Callable[..., None]:
    @functools.wraps(setter)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            setter(*args, **kwargs)
        except RuntimeError as error:
            if "cannot be modified after" not in str(error):
                raise
            tell(
                setter.__name__, "left out: the launcher gives each worker its devices and threads"
            )

    return call
