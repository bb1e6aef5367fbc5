"""Launches of `hvdtrain run --strategy` for strategies other than Horovod's."""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import hosts_of
from hvdtrain.launch.launch_command import LaunchCommand, this_site
from hvdtrain.launch.launchers import LAUNCHERS, one_process, parameter_servers
from hvdtrain.launch.launchers.one_process import check_here
from hvdtrain.launch.launchers.parameter_servers import (
    ServerPlan,
    number_of_workers,
    roomy,
)
from hvdtrain.launch.launchers.srun import choose_launcher
from hvdtrain.launch.option_types import options_of
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.plan_validation import check_given, check_key, check_variables
from hvdtrain.launch.rank_program import Program, program_given
from hvdtrain.launch.slurm.allocation import read_allocation
from hvdtrain.strategy_names import PARAMETER_SERVER, STRATEGIES

# Options that apply to every strategy; all others are for Horovod, or for one of the kinds below.
_ALWAYS = {
    *("script", "arguments", "module", "strategy", "env", "verbose"),
    *("config", "show_config", "dry_run"),
    *("log_dir", "all_ranks", "prefix_output_with_timestamp", "grace_seconds", "restarts"),
    "hang_timeout",
}
_OF_ONE_PROCESS = {"np"}
_OF_SERVERS = {
    *("workers", "ps", "hosts", "hostfile", "launcher"),
    *("ssh_port", "ssh_identity_file", "start_timeout"),
}


def other_launch(
    ctx: click.Context,
    strategy: str,
    workers: int | None,
    ps: int | None,
    values: dict[str, Any],
) -> LaunchCommand:
    """Prepare the launch, for the values of the other options of `hvdtrain run`.

    Raises:
        UsageError: An option is invalid or has no effect with the strategy, or this machine lacks its devices.
    """
    servers = STRATEGIES[strategy].runs_as == "servers"
    allowed = _ALWAYS | (_OF_SERVERS if servers else _OF_ONE_PROCESS)
    void = _refuse(ctx, strategy, allowed)
    values = {name: value for name, value in values.items() if name not in void}
    program = program_given(values)
    check_given(program, options_of(LaunchPlan), values)
    check_variables(values["env"])
    if not servers:
        replicas = values.get("np")
        if not ctx.params["dry_run"]:
            check_here(strategy, replicas, os.environ)
        return one_process.prepare(strategy, program, values["env"], this_site(), replicas)
    servers_plan = _server_plan(program, workers, 1 if ps is None else ps, values)
    return parameter_servers.prepare(servers_plan, this_site())


def _refuse(ctx: click.Context, strategy: str, allowed: set[str]) -> set[str]:
    """Reject options without effect. Returns those to ignore instead.

    Ignored are options from a variable, or from a lower layer than --strategy, as they may be for another strategy.

    Raises:
        UsageError: Any other option has no effect.
    """
    layers = [ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP, ParameterSource.COMMANDLINE]
    said = ctx.get_parameter_source("strategy")
    void = set()
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        if option.name in allowed or source not in layers:
            continue
        # Variables may be set site-wide, for all jobs.
        behind = said in layers and layers.index(source) < layers.index(said)
        if source is not ParameterSource.ENVIRONMENT and not behind:
            advice = ""
            if strategy == PARAMETER_SERVER and option.name == "np":
                advice = "; use --workers N and --ps M"
            raise UsageError(
                f"{option.opts[0]} has no effect with --strategy {strategy}: leave it out{advice}"
            )
        void.add(option.name or "")
    return void


def _server_plan(
    program: Program, workers: int | None, servers: int, values: dict[str, Any]
) -> ServerPlan:
    hosts = hosts_of(values.get("hosts"), values.get("hostfile"))
    by_srun = values["launcher"] == "srun"
    allocation = read_allocation(os.environ, own_hosts=bool(hosts) and not by_srun)
    if allocation is not None and not hosts:
        # The user's numbers take precedence over the job's number of tasks.
        hosts = allocation.hosts if workers is None else roomy(allocation.hosts, workers + servers)
    workers = number_of_workers(workers, servers, hosts)
    launcher = choose_launcher(values["launcher"], allocation, hosts)
    if launcher not in LAUNCHERS:
        raise UsageError(
            f"--launcher {launcher} is for Horovod's workers: leave it out; parameter servers are "
            "started over ssh"
        )
    if allocation is not None and {host.name for host in hosts} == {allocation.this_node}:
        hosts, launcher = (), "horovodrun"  # This machine, whose name need not resolve here.
    check_key(values.get("ssh_identity_file"))
    return ServerPlan(
        program=program,
        env=values["env"],
        workers=workers,
        servers=servers,
        hosts=hosts,
        by_srun=launcher == "srun",
        ssh_port=values.get("ssh_port"),
        ssh_identity_file=values.get("ssh_identity_file"),
        start_timeout=values.get("start_timeout"),
    )
