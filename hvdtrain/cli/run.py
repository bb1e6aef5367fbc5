"""`hvdtrain run`: run a training script on several workers."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.adopt_options import BATCHES, SCALINGS
from hvdtrain.cli.config_option import (
    ConfiguredCommand,
    config_text,
    is_set,
    load_config,
    set_indirectly,
    with_variables,
    without_outranked,
)
from hvdtrain.cli.hidden_values import conceal_secrets
from hvdtrain.cli.hints import unread_variables
from hvdtrain.cli.launch_options import (
    PATH,
    Parsed,
    Seconds,
    files_here,
    flag,
    grouped,
    launch_options,
)
from hvdtrain.environment import HANG_SECONDS, RESUME
from hvdtrain.errors import UsageError
from hvdtrain.launch.autotuning import with_tuning
from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.launch_command import LaunchCommand, check_started_once, this_site
from hvdtrain.launch.launchers import find_launcher
from hvdtrain.launch.plan_validation import check_image, check_servers
from hvdtrain.launch.planning import STALL_TIMES, plan_of
from hvdtrain.launch.running.session import OutputOptions, RunLimits, run_launch
from hvdtrain.launch.running.watchdog import limits_of
from hvdtrain.launch.secrets import MASK, masked, secret_values, variable_to_pass
from hvdtrain.launch.slurm.allocation import read_allocation
from hvdtrain.profiled_steps import MOST_STEPS, PROFILE, STEPS, ProfiledSteps, parse_steps
from hvdtrain.strategy_names import ALIASES, HOROVOD, STRATEGIES, choose_strategy

_STRATEGIES = [*STRATEGIES, *ALIASES]


def _call(word: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    """Return the callback of a flag that runs `hvdtrain WORD` instead."""

    def call(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            from hvdtrain.cli.command_table import main

            main.main([word], prog_name="hvdtrain")

    return call


@click.command(cls=ConfiguredCommand, context_settings={"allow_interspersed_args": False})
@launch_options
@grouped(
    "strategy", "--strategy", default=HOROVOD, show_default=True, metavar="NAME",
    help=f"How to distribute the training: {', '.join(_STRATEGIES)}.",
    shell_complete=lambda ctx, option, begun: [one for one in _STRATEGIES if one.startswith(begun)],
)  # fmt: skip
@grouped(
    "strategy", "--workers", type=int, metavar="N",
    help="With --strategy parameter-server: number of workers. The chief, which runs SCRIPT, is not counted.  "
    "[default: all slots not used by servers]",
)  # fmt: skip
@grouped(
    "strategy", "--ps", type=int, metavar="N",
    help="With --strategy parameter-server: number of servers. Placed on the hosts before the workers; the chief runs "
    "here.  [default: 1]",
)  # fmt: skip
@grouped(
    "hosts", "--hostfile", type=PATH, metavar="FILE", aliases=["-hostfile"],
    help="File with one host per line, as 'NAME slots=N'; instead of --hosts.",
)  # fmt: skip
@grouped(
    "basic", "--log-dir", type=PATH, metavar="FOLDER",
    help="Folder for every worker's output.  [default: .hvdtrain/logs/TIME]",
)  # fmt: skip
@flag("basic", "--all-ranks", help="Show the output of all workers, not only rank 0's.")
@flag(
    "output", "--prefix-output-with-timestamp", "-prefix-timestamp",
    help="Prefix each line of the workers' output with the time.",
)  # fmt: skip
@flag("basic", "--module", "-m", help="SCRIPT is the name of a module, as with python -m.")
@flag(
    "basic", "--adopt",
    help="SCRIPT is an ordinary Keras script: share each batch of its model.fit among the workers.",
)  # fmt: skip
@grouped(
    "adopt", "--adopt-batch", type=click.Choice(BATCHES),
    help="With --adopt: the workers share each batch of the script, or each of them has a whole one.  "
    "[default: global]",
)  # fmt: skip
@grouped(
    "adopt", "--adopt-learning-rate", type=click.Choice(SCALINGS),
    help="With --adopt: multiply the learning rate by the number of workers, or its square root.  [default: none]",
)  # fmt: skip
@flag(
    "adopt", "--adopt-explain", help="With --adopt: tell of all that is done otherwise than on one process."
)  # fmt: skip
@grouped(
    "basic", "--grace-seconds", type=Seconds(min=0), default=30.0, show_default=True, metavar="SECONDS",
    help="Time to stop for scripts that handle SIGTERM or KeyboardInterrupt.",
)  # fmt: skip
@grouped(
    "stall", "--hang-timeout", type=Seconds(min=0), default=HANG_SECONDS, show_default=True, metavar="SECONDS",
    help="End the run when no worker has made progress for this long; after 20 s if one is frozen or gone. 0: never.",
)  # fmt: skip
@grouped(
    "basic", "--restarts", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
    help="Restart a run that failed after making progress, up to N times. The script must resume from its own "
    "checkpoints.",
)  # fmt: skip
@grouped(
    "basic", "--resume", type=click.Choice(["auto", "must", "never"]),
    help="Whether hvdtrain.Trainer resumes from its checkpoints; overrides Trainer(resume=...).",
)  # fmt: skip
@grouped(
    "basic", "--profile", type=Parsed("steps", ProfiledSteps, parse_steps), metavar="FIRST-LAST",
    help="Make hvdtrain.Trainer write profile.json.gz, a trace of these steps on all workers, for "
    f"https://ui.perfetto.dev. At most {MOST_STEPS} steps; FIRST alone means {STEPS} steps.",
)  # fmt: skip
@grouped(
    "hosts", "--container", metavar="IMAGE",
    help="Image for the workers of a Slurm job, with Horovod and hvdtrain in it. *.sif and "
        "docker://... images run in Apptainer, others through srun's pyxis plugin.",
)  # fmt: skip
@grouped(
    "about", "--config", type=PATH, metavar="FILE", is_eager=True, callback=load_config, aliases=["--config-file"],
    help="YAML file with script, arguments and options, named as here or laid out as for horovodrun --config-file. "
    "Paths in it are relative to its folder. HVDTRAIN_<NAME> variables override it, and the command line overrides "
    "both. Arguments after -- are passed to its script.",
)  # fmt: skip
@flag(
    "about", "--show-config",
    help="Print the values of all options in the format of --config, with the source of each.",
)  # fmt: skip
@flag("about", "--dry-run", help="Print the command; do not run it.")
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
    resume: str | None,
    profile: ProfiledSteps | None,
    container: str | None,
    dry_run: bool,
    strategy: str,
    workers: int | None,
    ps: int | None,
    **values: Any,
) -> None:
    """Run SCRIPT on several workers, with horovodrun or, in a Slurm job of several nodes, srun.

    SCRIPT is a Python script, a module with -m, or another program such as `bash job.sh`; `python train.py` is
    the same as `train.py`. ARGUMENTS are passed to it.

    In a Slurm job, -np is not needed: there is one worker per task of the job, or per GPU if the job requested
    no tasks.

    Strategies other than Horovod's run as one process (tpu, central-storage) or as a chief, workers and
    servers (parameter-server). `hvdtrain strategies` shows what each is for.

    Rank 0's output is shown as if the script ran alone; the output of all workers is kept in files. The exit
    code is that of the worker that failed first.
    """
    if resume is not None:
        values["env"] += (EnvVar(RESUME, resume),)
    if profile is not None:
        values["env"] += (EnvVar(PROFILE, str(profile)),)
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
    chosen = {name: None for name in STALL_TIMES if not is_set(ctx, name)}
    values = with_variables(ctx, without_outranked(ctx, values) | chosen)
    choice = choose_strategy(strategy)
    if choice.note:
        click.echo(choice.note, err=True)
    view = OutputOptions(log_dir, all_ranks, bool(values["verbose"]), prefix_output_with_timestamp)
    limits = limits_of(hang_timeout) if hang_timeout else None
    patience = RunLimits(grace_seconds, limits, restarts)
    # Secret values that only the options contain.
    secrets = secret_values(values["env"]).items()
    left_out = [name for name, value in secrets if os.environ.get(name) != value]
    if choice.name != HOROVOD:
        from hvdtrain.cli.run_strategy import other_launch

        env = tuple(map(variable_to_pass, values["env"]))
        launch = other_launch(ctx, choice.name, workers, ps, values | {"env": env})
        _print_or_run(launch, view, patience, dry_run, left_out)
        return
    check_servers(choice.name, workers, ps)
    if container is not None:
        check_image(container)
        values["launcher"] = _launcher_of_containers(values["launcher"])
    own_hosts = any(values.get(name) for name in ("hosts", "hostfile", "host_discovery_script"))
    by_srun = values["launcher"] == "srun"
    allocation = read_allocation(os.environ, own_hosts=own_hosts and not by_srun)
    site = this_site(allocation, container)
    say = partial(click.echo, err=True)
    plan = plan_of(values, site, say, set_indirectly(ctx))
    plan = with_tuning(plan, say, dry_run=dry_run)
    if hang_timeout:
        patience = replace(patience, limits=limits_of(hang_timeout, plan))
    _print_or_run(find_launcher(plan.launcher)(plan, site), view, patience, dry_run, left_out)


def print_command(argv: Sequence[str], left_out: Sequence[str] = ()) -> None:
    """Print the command, and on standard error which secrets it lacks."""
    shown = masked(argv)
    click.echo(os.fsencode(shlex.join(shown)))  # Arguments and names of files may be any bytes.
    if left_out:
        names = ", ".join(left_out)
        click.echo(
            f"before you paste this, set {names}: the command does not contain secret values",
            err=True,
        )
    if shown != list(argv):
        click.echo(f"before you paste this, replace {MASK} with the secret values", err=True)


def _print_or_run(
    launch: LaunchCommand,
    view: OutputOptions,
    patience: RunLimits,
    dry_run: bool,
    left_out: Sequence[str],
) -> None:
    """Print the command, or run it and exit with its exit code."""
    if dry_run:
        print_command(launch.typed, left_out)
        for line in launch.notes:
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
            process_names=launch.process_names,
        )
    )


def _launcher_of_containers(wanted: str) -> str:
    if wanted not in {"auto", "srun"}:
        raise UsageError(
            f"--container is for workers started by srun: leave out --launcher {wanted}; "
            "on one machine, hvdtrain docker runs them in a container"
        )
    return "srun"
