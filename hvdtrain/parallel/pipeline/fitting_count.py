"""The number of micro-batches with which a step is estimated to fit into the memory of every rank."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import psutil
import tensorflow as tf

from hvdtrain.errors import EngineError, HvdtrainError, UsageError
from hvdtrain.host_limits import TOO_LOW, memory_limit
from hvdtrain.keras_internals.variables import bytes_of
from hvdtrain.messages import logger
from hvdtrain.parallel.step_memory import peak_bytes, step_bytes
from hvdtrain.rank_variables import local_size_of

if TYPE_CHECKING:
    from hvdtrain.collectives.communicator import Communicator
    from hvdtrain.parallel.pipeline.stage_steps import PipelineSteps

SHARES = 3
"""Number of shares of the data in memory: the one in use, and two that are prefetched."""
FUSION = 128 * 2**20
"""Default of the maximum size of Horovod's fusion buffer in bytes."""
GPU_RESERVE = 2**30
"""Memory of a GPU in bytes for CUDA, and for the workspaces of kernels."""
_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


def agree_on_count(steps: PipelineSteps, model: keras.Model, data: Any, ranks: Communicator) -> int:
    """Return the number of micro-batches that fits on all ranks: the largest that a rank needs.

    A collective of `ranks`. The memory of the device counts, not what is free of it: a training that is resumed takes
    the same number.

    Args:
        steps: Steps of an only stage. They are traced, but not run.
        model: Model with all of its variables and those of its optimizer.
        data: Symbolic (x, y, sample_weight) of a rank's share.
        ranks: All ranks.

    Raises:
        UsageError: The data has no fixed shapes, or a step with micro-batches of one example does not fit on a rank.
    """
    try:
        mine: dict[str, Any] = {"count": fitting_count(steps, model, data, room_for_step(model))}
    except HvdtrainError as error:
        mine = {"count": 0, "complaint": str(error)}
    everyone = ranks.exchange(mine, "micro_batches")
    for rank, found in enumerate(everyone):
        if not found["count"]:
            raise UsageError(f"Rank {rank}: {found['complaint']}")
    count = max(int(found["count"]) for found in everyone)
    if ranks.rank() == 0:
        logger().info('micro_batches="auto": shares are computed in %s', _parts(count))
    return count


def _parts(count: int) -> str:
    return f"{count} micro-batches" if count > 1 else "one piece"


def fitting_count(steps: PipelineSteps, model: keras.Model, data: Any, room: int) -> int:
    """Return the smallest power of two, at most the examples of a share, so that a step takes at most `room` bytes.

    Raises:
        UsageError: The data has no fixed shapes, or there is no such number.
    """
    leaves = tf.nest.flatten(data)
    if any(None in leaf.shape for leaf in leaves):
        raise UsageError(
            'micro_batches="auto" needs examples of one fixed shape, to estimate their memory: pass a number'
        )
    examples = leaves[0].shape[0]
    count = 1
    while True:
        needed = round(TOO_LOW * _needed(steps, model, data, count))
        if needed <= room:
            return count
        if count == examples:
            raise UsageError(
                f'micro_batches="auto": a step is estimated to take {needed / 1e9:.2f} GB, even if the examples are '
                f"computed one by one, and {max(0, room) / 1e9:.2f} GB of memory are left for it: use fewer ranks "
                "per host or a smaller model, or pass a number to try it"
            )
        count = min(2 * count, examples)


def _needed(steps: PipelineSteps, model: keras.Model, data: Any, count: int) -> int:
    """Return the memory in bytes that a step in `count` micro-batches takes beside the state of the model."""
    steps.count = count
    gradients = bytes_of(model.trainable_variables)

    def part(leaf: Any) -> tf.TensorSpec:
        return tf.TensorSpec((-(-leaf.shape[0] // count), *leaf.shape[1:]), leaf.dtype)

    micro_batch = tf.nest.map_structure(part, data)
    batch = sum(
        leaf.shape.num_elements() * leaf.dtype.size for leaf in tf.nest.flatten(micro_batch)
    )
    peak = peak_bytes(steps.trace(micro_batch))
    step = step_bytes(peak, gradients, count, steps.in_memory)
    return sum(step.values()) + min(fusion_limit(os.environ), gradients) + SHARES * count * batch


def fusion_limit(environ: Mapping[str, str]) -> int:
    """Return the maximum size of Horovod's fusion buffer in bytes."""
    given = environ.get("HOROVOD_FUSION_THRESHOLD", "")
    return int(given) if given.isdecimal() else FUSION


def room_for_step(model: keras.Model) -> int:
    """Return the memory in bytes that this rank's device has for a step, beside the program and the state of `model`.

    Raises:
        EngineError: The size of the GPUs' memory cannot be read.
    """
    if tf.config.list_logical_devices("GPU"):
        state = bytes_of([*model.variables, *model.optimizer.variables])
        return _smallest_gpu() - GPU_RESERVE - state
    program = psutil.Process().memory_info().rss
    return memory_limit() // local_size_of(os.environ) - program


def _smallest_gpu() -> int:
    """Return the memory in bytes of the smallest GPU of this host."""
    try:
        said = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True).stdout
        return min(map(int, said.split())) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EngineError(
            f'micro_batches="auto" reads the memory of the GPUs with {_QUERY[0]}, which failed: {error}. Pass a number'
        ) from None
