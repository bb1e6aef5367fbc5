"""Options of torchrun, accelerate and mpirun that have no counterpart of the same form: what to give instead.

Those that mean the same as one of ours are names of it (see `hvdtrain.launch.options.Option.aliases`).
"""

from __future__ import annotations

_HOSTS = "-H NAME:SLOTS,... names the hosts; in Slurm, hvdtrain submit --nodes N asks for them"
_ONCE = "leave it out: hvdtrain run is called once, on one host, and the workers find each other"
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
    "mixed_precision": "set it in the script: hvdtrain.Trainer(..., precision=...)",
    # Where it is no name of -np.
    "gpus": "--gpus-per-node N asks Slurm for GPUs, -np N for workers",
    "x": "--env NAME=VALUE, or --env NAME",
}


def instead(option: str) -> str:
    """What to use instead of another launcher's option; empty if it is not one."""
    return _INSTEAD.get(option.lstrip("-").replace("-", "_"), "")
