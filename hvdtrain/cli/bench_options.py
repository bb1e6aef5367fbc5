"""Options and helpers that the `hvdtrain bench` commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from hvdtrain.bench.figures import Figure
from hvdtrain.bench.measurement import Comparison, Launch
from hvdtrain.cli.bench_findings import OUTPUT
from hvdtrain.launch.installed_horovod import choose_controller, installed_controllers
from hvdtrain.launch.launch_command import this_site
from hvdtrain.launch.launchers import horovodrun
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rank_program import Kind, Program

_Command = TypeVar("_Command", bound=Callable[..., Any])
SMALL = {"mnist": 64, "resnet20": 32, "mlp": 64}
BATCH_SIZES = {**SMALL, "mlp-100m": 64, "resnet50": 4, "transformer": 8}


def batch_size_per(worker: str) -> Callable[[_Command], _Command]:
    """Return the option --batch-size, of examples per "worker" or "core"."""
    sizes = ", ".join(f"{size} {model}" for model, size in BATCH_SIZES.items())
    return click.option(
        "--batch-size", type=click.IntRange(1), help=f"Examples per {worker}.  [default: {sizes}]"
    )


def workers(least: int) -> Callable[[_Command], _Command]:
    """Return the option -np of a measurement that needs at least this many workers."""
    return click.option(
        "-np", "--num-proc", "np", type=click.IntRange(least), default=2, show_default=True, metavar="N",
        help="Number of workers.",
    )  # fmt: skip


CONTROLLER = click.option(
    "--controller", type=click.Choice(["auto", "mpi", "gloo"]), default="auto", show_default=True,
    help="How workers coordinate.",
)  # fmt: skip
MODEL = click.option(
    "--model", type=click.Choice(sorted(BATCH_SIZES)), default="mnist", show_default=True
)
PASSES = click.option(
    "--passes", type=click.IntRange(1), default=5, show_default=True, help="Number of measurements.",
)  # fmt: skip


def measured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options of what is measured on ranks, in passes, and with its context."""
    for option in (click.pass_context, OUTPUT, PASSES, CONTROLLER):
        command = option(command)
    return command


def pair(
    reference: str, measured: str, done: Sequence[Comparison], panel: str = ""
) -> tuple[Figure, Figure]:
    """Return both figures of comparisons, by the names given."""
    return (
        Figure(reference, tuple(one.reference for one in done), panel),
        Figure(measured, tuple(one.measured for one in done), panel),
    )


def launcher(controller: str, kind: Kind = "script", **settings: Any) -> tuple[Launch, str]:
    """Return a function that composes the argv of a script on N ranks, and the controller that it uses.

    Args:
        kind: What the function gets: the path of a "script", or the name of a "module" for two ranks or more.
        settings: Further fields of LaunchPlan.
    """
    built, site = installed_controllers(), this_site()
    chosen = choose_controller(controller, built, site.mpirun)

    def launch(np: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
        if np == 1:
            return [sys.executable, str(script), *arguments]
        program = Program(script, arguments, kind)
        plan = LaunchPlan(program=program, np=np, controller=chosen, **settings)
        prepared = horovodrun.prepare(plan, site)
        return prepared.with_settings(prepared.argv)

    return launch, chosen


def line(cells: tuple[str, ...]) -> str:
    """Return a line of a table."""
    return "".join(f" {cell:>13}" for cell in cells)
