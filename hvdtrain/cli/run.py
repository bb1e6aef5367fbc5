"""`hvdtrain run`: a training script on several workers."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.cli.concealment import conceal_secrets
from hvdtrain.cli.config import (
    ConfiguredCommand,
    config_text,
    from_behind,
    load_config,
    with_variables,
    without_outranked,
)
from hvdtrain.cli.misspelt import unread_variables
from hvdtrain.cli.options import (
    PATH,
    GroupedOption,
    files_here,
    launch_options,
    strategy_options,
)
from hvdtrain.errors import UsageError
from hvdtrain.launch.command import Prepared, Site, this_site
from hvdtrain.launch.cores import usable_cores
from hvdtrain.launch.engine import choose_controller, find_engine
from hvdtrain.launch.hosts import read_hostfile
from hvdtrain.launch.launchers import find_launcher
from hvdtrain.launch.launchers.srun import choose_launcher, choose_srun_controller, used_hosts
from hvdtrain.launch.nested import check_started_once
from hvdtrain.launch.plan import LaunchPlan, without_effect
from hvdtrain.launch.program import program_of
from hvdtrain.launch.rules import check_image, fitting_stall_times
from hvdtrain.launch.running.session import Patience, View, run_launch
from hvdtrain.launch.running.watchdog import HANG_SECONDS, limits_of
from hvdtrain.launch.secrets import MASK, looks_secret, masked, variable_to_pass
from hvdtrain.launch.slurm.allocation import Allocation, read_allocation
from hvdtrain.launch.strategies.devices import visible_gpus
from hvdtrain.launch.variables import EnvVar
from hvdtrain.strategy_names import HOROVOD, PARAMETER_SERVER, choose_strategy

# Of a machine without GPUs, if nobody said how many.
_MOST_WORKERS_OF_CORES = 8


def _call(word: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    """Callback of a flag: `hvdtrain WORD` is what runs."""

    def call(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            from hvdtrain.cli import main

            main.main([word], prog_name="hvdtrain")

    return call


@click.command(cls=ConfiguredCommand, context_settings={"allow_interspersed_args": False})
@launch_options
@strategy_options
@click.option(
    "--hostfile", type=PATH, metavar="FILE", cls=GroupedOption, group="hosts", aliases=["-hostfile"],
    help="File with a line 'NAME slots=N' for each host, instead of --hosts.",
)  # fmt: skip
@click.option(
    "--log-dir", type=PATH, metavar="FOLDER", cls=GroupedOption, group="basic",
    help="Folder for every worker's output.  [default: .hvdtrain/logs/TIME]",
)  # fmt: skip
@click.option(
    "--all-ranks", is_flag=True, cls=GroupedOption, group="basic",
    help="Show the output of all workers, not only rank 0's.",
)  # fmt: skip
@click.option(
    "--prefix-output-with-timestamp", "-prefix-timestamp", is_flag=True,
    cls=GroupedOption, group="basic", help="The time in front of each line of the workers.",
)  # fmt: skip
@click.option(
    "--module", "-m", is_flag=True, cls=GroupedOption, group="basic",
    help="SCRIPT is the name of a module, as with python -m.",
)  # fmt: skip
@click.option(
    "--grace-seconds", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="SECONDS",
    cls=GroupedOption, group="basic",
    help="Time for scripts that handle the signal which ends the run (SIGTERM, KeyboardInterrupt).",
)  # fmt: skip
@click.option(
    "--hang-timeout", type=click.FloatRange(min=0), default=HANG_SECONDS, show_default=True,
    metavar="SECONDS", cls=GroupedOption, group="stall",
    help="End the run when no worker has made progress for so long; when one is frozen or has gone, after "
    "20 s. 0: never.",
)  # fmt: skip
@click.option(
    "--restarts", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
    cls=GroupedOption, group="basic",
    help="Start the run again when it failed after it had made progress, up to N times: for scripts that go on "
    "from what they have saved.",
)  # fmt: skip
@click.option(
    "--container", metavar="IMAGE", cls=GroupedOption, group="basic",
    help="Image for the workers of a Slurm job: a file *.sif or docker://... runs in Apptainer, others "
    "by srun's pyxis plugin. It needs Horovod and hvdtrain.",
)  # fmt: skip
@click.option(
    "--config", type=PATH, metavar="FILE", cls=GroupedOption, group="about",
    is_eager=True, callback=load_config, aliases=["--config-file"],
    help="YAML file with options under their names here, script and arguments, or in the layout of "
    "horovodrun --config-file. Paths in it begin at its folder. The command line and HVDTRAIN_<NAME> variables "
    "go before it; words behind -- are arguments for its script.",
)  # fmt: skip
@click.option(
    "--show-config", is_flag=True, cls=GroupedOption, group="about",
    help="Print the options' values as such a file, and where each comes from.",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, cls=GroupedOption, group="about",
    help="Print the command, and do not run it.",
)  # fmt: skip
@click.option(
    "--check-build", "-cb", is_flag=True, hidden=True, is_eager=True, expose_value=False,
    callback=_call("doctor"), help="hvdtrain doctor",
)  # fmt: skip
@click.option(
    "--version", "-v", is_flag=True, hidden=True, is_eager=True, expose_value=False,
    callback=_call("--version"), help="hvdtrain --version",
)  # fmt: skip
@click.argument("script", type=PATH)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=files_here)
@click.pass_context
def run(
    ctx: click.Context,
    config: Path | None,
    show_config: bool,
    log_dir: Path | None,
    all_ranks: bool,
    prefix_output_with_timestamp: bool,
    grace_seconds: float,
    hang_timeout: float,
    restarts: int,
    container: str | None,
    dry_run: bool,
    strategy: str,
    workers: int | None,
    ps: int | None,
    **values: Any,
) -> None:
    """Run SCRIPT on several workers, through horovodrun or, in a Slurm job of several nodes, srun.

    SCRIPT is a Python script, a module with -m, or another program, such as bash job.sh; python train.py is
    the same as train.py.

    In a Slurm job no numbers are needed: it runs a worker for each task of the job, or for each GPU
    if the job did not ask for tasks.

    With --strategy it runs without Horovod: tpu and central-storage as one process, parameter-server
    as a chief, workers and servers. `hvdtrain strategies` tells what each is for.

    What follows SCRIPT is the script's own. Rank 0's output is shown as if the script ran alone;
    the output of all workers is kept in files. The exit code is that of the worker that failed
    first.
    """
    named = {one.name for one in values["env"]}
    for message in unread_variables(ctx.command, os.environ.keys() - named):
        click.echo(message, err=True)
    if show_config:
        click.echo(config_text(ctx))
        return
    check_started_once(os.environ)
    if not dry_run:
        typed = ctx.get_parameter_source("arguments") is ParameterSource.COMMANDLINE
        conceal_secrets(values["env"], values["arguments"] if typed else ())
    values = with_variables(ctx, without_outranked(ctx, values))
    choice = choose_strategy(strategy)
    if choice.note:
        click.echo(choice.note, err=True)
    view = View(log_dir, all_ranks, bool(values["verbose"]), prefix_output_with_timestamp)
    left_out = _names_left_out(values["env"])
    if choice.name != HOROVOD:
        from hvdtrain.cli.run_strategy import other_launch

        env = tuple(map(variable_to_pass, values["env"]))
        launch = other_launch(ctx, choice.name, workers, ps, values | {"env": env})
        _print_or_run(launch, view, Patience(grace_seconds, restarts=restarts), dry_run, left_out)
        return
    for name, number in (("--workers", workers), ("--ps", ps)):
        if number is not None:
            raise UsageError(
                f"{name} is for --strategy {PARAMETER_SERVER}; Horovod's workers: -np N"
            )
    if container is not None:
        check_image(container)
        values["launcher"] = _launcher_of_containers(values["launcher"])
    own_hosts = any(values.get(name) for name in ("hosts", "hostfile", "host_discovery_script"))
    by_srun = values["launcher"] == "srun"
    allocation = read_allocation(os.environ, own_hosts=own_hosts and not by_srun)
    site = this_site(allocation, container)
    plan = plan_of(values, site, behind=from_behind(ctx))
    limits = limits_of(hang_timeout) if hang_timeout else None
    patience = Patience(grace_seconds, limits, restarts)
    _print_or_run(find_launcher(plan.launcher)(plan, site), view, patience, dry_run, left_out)


def _names_left_out(variables: Iterable[EnvVar]) -> list[str]:
    """The variables whose values are secret, and only in the options."""
    return [
        one.name
        for one in variables
        if one.value is not None
        and looks_secret(one.name, one.value)
        and os.environ.get(one.name) != one.value
    ]


def print_command(argv: Sequence[str], left_out: Sequence[str] = ()) -> None:
    """Print the command, and on standard error what it lacks: secrets."""
    shown = masked(argv)
    click.echo(shlex.join(shown))
    if left_out:
        names = ", ".join(left_out)
        click.echo(f"before you paste this, set {names}: secret values are not in it", err=True)
    if shown != list(argv):
        click.echo(f"before you paste this, put the secret values where {MASK} is", err=True)


def _print_or_run(
    launch: Prepared, view: View, patience: Patience, dry_run: bool, left_out: Sequence[str]
) -> None:
    """Print the command, or run it and exit as it does."""
    if dry_run:
        print_command(launch.typed, left_out)
        for line in launch.lacks:
            click.echo(line, err=True)
        return
    if view.verbose:
        click.echo(shlex.join(masked(launch.typed)), err=True)
    environ = launch.environment(os.environ)
    view = replace(view, command=shlex.join(masked(["hvdtrain", *sys.argv[1:]])))
    sys.exit(
        run_launch(
            launch.argv,
            view,
            patience,
            environ=environ,
            elastic=launch.elastic,
            members=launch.members,
        )
    )


def _launcher_of_containers(wanted: str) -> str:
    if wanted not in {"auto", "srun"}:
        raise UsageError(
            f"--container is for workers that srun starts: leave out --launcher {wanted}; "
            "on one machine, hvdtrain docker runs them in a container"
        )
    return "srun"


def plan_of(values: dict[str, Any], site: Site, behind: Container[str] = ()) -> LaunchPlan:
    """The plan that the options `values` ask for, here. Raises UsageError.

    Args:
        behind: the options that are left out, and said, where they have no effect.
    """
    values = {name: value for name, value in values.items() if value is not None}
    hostfile = values.pop("hostfile", None)
    if hostfile is not None:
        if "hosts" in values:
            raise UsageError("--hosts and --hostfile both name the hosts: give one of them")
        values["hosts"] = read_hostfile(hostfile)
    elastic = bool({"host_discovery_script", "min_np", "max_np"} & values.keys())
    _choose_place(values, elastic, site.allocation)
    _choose_stall_times(values)
    engine, wanted, mpirun = find_engine(), values["controller"], site.mpirun
    if elastic and wanted == "auto":
        wanted = "gloo"
    if values["launcher"] == "srun":
        # srun stands in for mpirun.
        mpirun, wanted = "srun", choose_srun_controller(wanted, engine.built)
    values["controller"] = choose_controller(wanted, engine.built, mpirun)
    for setting, remedy in without_effect(values):
        if setting.field in behind:
            click.echo(f"{setting.name} has no effect here, and is left out: {remedy}", err=True)
            del values[setting.field]
    values["env"] = tuple(map(variable_to_pass, values.get("env", ())))
    program = program_of(
        values.pop("script"), values.pop("arguments", ()), module=values.pop("module", False)
    )
    return LaunchPlan(
        script=program.name,
        arguments=program.arguments,
        kind=program.kind,
        python=program.python,
        python_options=program.python_options,
        **values,
    )


def _choose_place(values: dict[str, Any], elastic: bool, allocation: Allocation | None) -> None:
    """Set the number of ranks, their hosts and what starts them, as far as the user did not."""
    wanted = values["launcher"]
    if elastic:
        if wanted == "srun":
            raise UsageError("srun starts a fixed number of workers: elastic needs horovodrun")
        allocation = None
    own_hosts = "hosts" in values
    if allocation is not None and not own_hosts:
        here = len(allocation.hosts) == 1 and allocation.this_node is not None
        slots = max(values.get("np", 0), allocation.hosts[0].slots)
        alone = (replace(allocation.hosts[0], slots=slots),)
        # More ranks than the job asked for have a place on its only node, but no order on several.
        values["hosts"] = alone if here else allocation.hosts
        values.setdefault("np", sum(host.slots for host in allocation.hosts))
    values["np"] = _number_of_ranks(values)
    hosts = used_hosts(values.get("hosts", ()), values["np"])
    values["launcher"] = choose_launcher(wanted, allocation, hosts)
    local = allocation is not None and {host.name for host in hosts} == {allocation.this_node}
    if values["launcher"] == "horovodrun" and local and not own_hosts:
        del values["hosts"]  # This machine; its name need not resolve here.


def _choose_stall_times(values: dict[str, Any]) -> None:
    """Make the time to the job's end longer than that to the warning, and say so."""
    warning, shutdown = values["stall_warning_seconds"], values["stall_shutdown_seconds"]
    times = fitting_stall_times(warning, shutdown)
    if values["stall_check"] and times != (warning, shutdown):
        click.echo(
            f"--stall-shutdown-seconds {shutdown} is not longer than --stall-warning-seconds {warning}: "
            f"taking {times[1]} and {times[0]}",
            err=True,
        )
        values["stall_warning_seconds"], values["stall_shutdown_seconds"] = times


def _number_of_ranks(values: dict[str, Any]) -> int:
    if "np" in values:
        return int(values["np"])
    if "hosts" in values:
        return sum(host.slots for host in values["hosts"])
    if "min_np" in values:
        return int(values["min_np"])
    if "host_discovery_script" in values:
        raise UsageError("how many workers to start with? Give -np N")
    number, reason = workers_here(len(visible_gpus(os.environ)), usable_cores)
    click.echo(f"-np {number}: {reason}", err=True)
    return number


def workers_here(gpus: int, cores: Callable[[], int]) -> tuple[int, str]:
    """The number of workers for this machine, and why.

    A worker a core was faster than one worker with several, for networks of all but the widest layers; with many
    cores it would be many copies of model and TensorFlow, and small shares of the batch.
    """
    if gpus:
        return gpus, f"one worker for each GPU here ({gpus})"
    found = cores()
    number = min(found, _MOST_WORKERS_OF_CORES)
    if number == found:
        return number, f"there is no GPU here; one worker for each core ({found})"
    return number, f"there is no GPU here; the {found} cores are shared by {number} workers"
