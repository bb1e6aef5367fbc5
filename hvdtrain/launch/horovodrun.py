"""LaunchPlan -> horovodrun's options. A pure function."""

from hvdtrain.launch.plan import LaunchPlan


def horovodrun_options(plan: LaunchPlan) -> list[str]:
    """The options of horovodrun 0.28.1 that say what `plan` says, without the command."""
    options = ["-np", str(plan.np), f"--{plan.controller}"]
    if plan.hosts:
        options += ["-H", ",".join(map(str, plan.hosts))]
    if plan.start_timeout is not None:
        options += ["--start-timeout", str(plan.start_timeout)]
    if plan.network_interfaces:
        options += ["--network-interfaces", ",".join(plan.network_interfaces)]
    if plan.ssh_port is not None:
        options += ["--ssh-port", str(plan.ssh_port)]
    if plan.ssh_identity_file is not None:
        options += ["--ssh-identity-file", str(plan.ssh_identity_file)]
    options += ["--stall-check-warning-time-seconds", str(plan.stall_warning_seconds)]
    options += ["--stall-check-shutdown-time-seconds", str(plan.stall_shutdown_seconds)]
    if plan.verbose:
        options += ["--verbose"]
    return options
