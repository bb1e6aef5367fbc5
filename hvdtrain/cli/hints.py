"""Hints for options of other launchers, and for HVDTRAIN_* variables that nothing reads."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import click

from hvdtrain.environment import SECRET_WORD
from hvdtrain.launch.env_forwarding import OWN_NAMES

_PREFIX = "HVDTRAIN_"
# Variables of Horovod's installation, scripts/setup.sh and docker/entrypoint.sh.
_OF_SETUP = {"HVDTRAIN_CACHE", "HVDTRAIN_VENV", "HVDTRAIN_SSH_KEYS", "HVDTRAIN_SSH_PORT"}

# Options of torchrun, accelerate and mpirun without a direct counterpart. Those with one are aliases of it (see
# `hvdtrain.launch.option_types.Option.aliases`).
_HOSTS = (
    "pass the hosts with -H NAME:SLOTS,...; in Slurm, request them with hvdtrain submit --nodes N"
)
_ONCE = (
    "leave it out: start hvdtrain run once, on one host; it starts the workers and connects them"
)
_INSTEAD = {
    **dict.fromkeys(("nnodes", "num_machines"), _HOSTS),
    **dict.fromkeys(
        (
            *("node_rank", "machine_rank", "master_addr", "master_port", "standalone"),
            *("main_process_ip", "main_process_port", "rdzv_id", "rdzv_endpoint", "rdzv_backend"),
        ),
        _ONCE,
    ),
    **dict.fromkeys(("multi_gpu", "no_python"), "leave it out: hvdtrain run detects it"),
    **dict.fromkeys(
        ("nproc", "nprocs", "num_procs", "num_workers", "ntasks", "world_size"),
        "-np N sets the number of workers",
    ),
    "mixed_precision": "set it in the script: hvdtrain.Trainer(..., precision=...)",
    # For commands where it is not an alias of -np.
    "gpus": "--gpus-per-node N requests GPUs from Slurm, -np N sets the number of workers",
    "x": "--env NAME=VALUE, or --env NAME",
}


def instead(option: str) -> str:
    """Return what to use instead of another launcher's option. Empty if it is not one."""
    return _INSTEAD.get(option.lstrip("-").replace("-", "_"), "")


def unread_variables(command: click.Command, names: Iterable[str]) -> list[str]:
    """Return a message for each environment variable that looks like one of hvdtrain's, but is not."""
    known = OWN_NAMES | _OF_SETUP
    for option in command.params:
        known |= {name for name in option.envvar or () if name.startswith(_PREFIX)}
    unread = {name for name in names if name.startswith(_PREFIX)} - known
    unread -= {name for name in unread if name.startswith(SECRET_WORD)}
    return [f"{name} is set, but nothing reads it.{_hint(name, known)}" for name in sorted(unread)]


def _hint(name: str, known: Iterable[str]) -> str:
    # Without the prefix, which would make all of them similar.
    ends = [one.removeprefix(_PREFIX) for one in known]
    close = get_close_matches(name.removeprefix(_PREFIX), sorted(ends), n=1)
    return f" Did you mean {_PREFIX}{close[0]}?" if close else ""
