"""Strategies that run a script in one process, for all devices of this machine: TPU and central storage."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.errors import UsageError
from hvdtrain.launch.strategies.devices import tpu_here, visible_gpus
from hvdtrain.launch.strategies.script import Script, assignments
from hvdtrain.rank_variables import is_place
from hvdtrain.strategy_names import CENTRAL_STORAGE, REPLICAS, STRATEGY, TPU, replicas_of


def one_process_command(
    strategy: str, script: Script, replicas: int | None, environ: Mapping[str, str]
) -> list[str]:
    """`env NAME=VALUE... python -m hvdtrain.worker SCRIPT`, for the strategies of one process.

    Args:
        replicas: how many are wanted; None: as many as there are devices.
        environ: where the command runs; what would make a rank of the process is taken out.
    """
    settings = {
        STRATEGY: strategy,
        **({} if replicas is None else {REPLICAS: str(replicas)}),
        **script.values,
    }
    unset = [word for name in sorted(filter(is_place, environ)) for word in ("-u", name)]
    return ["env", *unset, *assignments(settings), *script.command]


def check_here(strategy: str, replicas: int | None, environ: Mapping[str, str]) -> None:
    """Raise UsageError if this machine lacks what the strategy needs."""
    if strategy == CENTRAL_STORAGE and replicas is None and replicas_of(environ) is None:
        count = len(visible_gpus(environ))
        if count < 2:
            raise UsageError(
                f"strategy {CENTRAL_STORAGE} needs at least two GPUs in one machine, and there "
                f"{'is one' if count else 'is none'} here: give -np N for N replicas on the cores "
                "of this machine, or leave --strategy out"
            )
    if strategy == TPU and not tpu_here(environ):
        raise UsageError(
            f"strategy {TPU} needs a TPU, and there is none here (no device file /dev/accel* or "
            "/dev/vfio/*, and TPU_NAME is not set): start on a TPU virtual machine, set TPU_NAME "
            "to the name of yours, or leave --strategy out"
        )
