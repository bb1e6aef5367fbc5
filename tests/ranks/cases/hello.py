"""Does the launcher itself work?"""

import os

import horovod.tensorflow as hvd
import tensorflow as tf


def case_size() -> list[int]:
    return [hvd.rank(), hvd.size()]


def case_sum() -> float:
    return float(hvd.allreduce(tf.constant(hvd.rank() + 1.0), op=hvd.Sum, name="sum"))


def case_one_rank_fails() -> None:
    if hvd.rank() == int(os.environ.get("FAILS", "-1")):
        raise RuntimeError("this rank fails")
    hvd.allreduce(tf.constant(0.0), name="after")
