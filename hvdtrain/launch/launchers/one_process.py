"""Launch the strategies that use one process for all devices of this machine: TPU and central storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.errors import UsageError
from hvdtrain.launch.devices import tpu_here, visible_gpus
from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.launch_command import LaunchCommand, Site, values_of
from hvdtrain.launch.rank_program import Program, rank_command
from hvdtrain.launch.running.process_names import ALONE
from hvdtrain.rank_variables import is_rank_variable
from hvdtrain.strategy_names import CENTRAL_STORAGE, REPLICAS, STRATEGY, TPU, replicas_of


def prepare(
    strategy: str,
    program: Program,
    variables: Sequence[EnvVar],
    site: Site,
    replicas: int | None = None,
) -> LaunchCommand:
    """Prepare `env NAME=VALUE... python -m hvdtrain.worker SCRIPT`, unsetting variables that would make it a rank.

    A variable that is secret has no value here, only in the environment. Without `replicas`, there is one per device.
    """
    settings = {
        **dict.fromkeys(sorted(filter(is_rank_variable, site.environ))),
        STRATEGY: strategy,
        **({} if replicas is None else {REPLICAS: str(replicas)}),
        **values_of(variables),
    }
    return LaunchCommand(tuple(rank_command(program)), settings, process_names=ALONE)


def check_here(strategy: str, replicas: int | None, environ: Mapping[str, str]) -> None:
    """Check that this machine has the devices that the strategy needs. Raises UsageError if not."""
    if strategy == CENTRAL_STORAGE and replicas is None and replicas_of(environ) is None:
        count = len(visible_gpus(environ))
        if count < 2:
            raise UsageError(
                f"strategy {CENTRAL_STORAGE} needs at least two GPUs in one machine, but this one has "
                f"{'one' if count else 'none'}: use -np N for N replicas on the cores of this machine, or "
                "leave --strategy out"
            )
    if strategy == TPU and not tpu_here(environ):
        raise UsageError(
            f"strategy {TPU} needs a TPU, and this machine has none (no device file /dev/accel* or "
            "/dev/vfio/*, and TPU_NAME is not set): run on a TPU VM, set TPU_NAME to the name of "
            "your TPU, or leave --strategy out"
        )
