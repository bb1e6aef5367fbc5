"""Do the launcher and the pools work?"""

import os
import time
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from references import reference
from results import Apart


def case_size() -> list[int]:
    return [hvd.rank(), hvd.size()]


def case_sum() -> float:
    return float(hvd.allreduce(tf.constant(hvd.rank() + 1.0), op=hvd.Sum, name="sum"))


def case_one_rank_fails() -> None:
    if hvd.rank() == int(os.environ.get("FAILS", "-1")):
        raise RuntimeError("this rank fails")
    hvd.allreduce(tf.constant(0.0), name="after")


def case_one_rank_hangs() -> None:
    if hvd.rank() == 1:
        time.sleep(600)


def case_process() -> int:
    return os.getpid()


def case_disorder() -> None:
    """Leaves behind all that the next case must not find."""
    os.environ["LEFT"] = "behind"
    keras.config.set_dtype_policy("mixed_float16")
    keras.layers.Dense(1)
    hvd.add_process_set([0])
    hello_is_new.clear()


hello_is_new = ["new"]


def case_order() -> list[Any]:
    return [
        os.environ.get("LEFT"),
        keras.config.dtype_policy().name,
        keras.layers.Dense(1).name,
        hvd.add_process_set([0]).ranks,
        *hello_is_new,
    ]


def case_compared() -> dict[str, Apart]:
    """`part` is 2 away on rank 0 and 3 on rank 1."""
    wanted = reference(
        lambda: {"part": [np.full(2, float(hvd.rank()))], "computed by": os.getpid()}
    )
    other = reference(lambda: {"part": {"loss": [1.0, 4.0]}})
    return {
        "array": wanted.apart([np.full(2, 2.0 + hvd.rank())], "part"),
        "computed by": wanted.apart(0, "computed by"),
        "history": other.apart({"loss": [1.0, 5.0]}, "part", "relative"),
    }
