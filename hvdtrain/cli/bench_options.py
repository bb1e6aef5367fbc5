"""Options and helpers that the `hvdtrain bench` commands share; `--output`, a file with what they have measured."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from hvdtrain.bench.figures import SUFFIXES, Figure, Findings
from hvdtrain.bench.measurement import Comparison, Launch
from hvdtrain.errors import UsageError
from hvdtrain.install.build_environment import version_of
from hvdtrain.launch.installed_horovod import choose_controller, installed_controllers
from hvdtrain.launch.launch_command import this_site
from hvdtrain.launch.launchers import horovodrun
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rank_program import Kind, Program
from hvdtrain.report.drawing import check_output

_OUTPUT = "hvdtrain.bench.output"
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


def _checked(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Refuse before the measurement what could not be written after it."""
    if path is None:
        return
    try:
        check_output(path, SUFFIXES)
    except UsageError as error:
        raise click.BadParameter(str(error)) from error
    context.meta[_OUTPUT] = path


OUTPUT = click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), callback=_checked, expose_value=False,
    metavar="FILE", help="Also write the figures of all passes as JSON (.json), or a chart (.png or .svg).",
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


def announce(measured: str) -> str:
    """Print what is measured, and on what; return it as the title for `finish`."""
    title = f"{measured}; {_machine()}"
    click.echo(title)
    return title


def finish(
    context: click.Context, title: str, unit: str, figures: Iterable[Figure], x: str = ""
) -> None:
    """Print the command that repeats the measurement, and write the file of --output.

    Args:
        context: Context of the command.
        title: What was measured, and on what.
        unit: Unit of the figures.
        figures: What was measured.
        x: Label of the horizontal axis of curves.
    """
    command = _again(context)
    click.echo(f"to repeat: {command}")
    path = context.meta.get(_OUTPUT)
    if path is not None:
        Findings(title, unit, tuple(figures), command, x).write(path)
        click.echo(f"wrote {path}")


def _again(context: click.Context) -> str:
    words = context.command_path.split()
    for parameter in context.command.params:
        if parameter.name not in context.params:
            continue  # --output.
        value: Any = context.params[parameter.name]
        values = value if parameter.multiple else [value]
        option = max(parameter.opts, key=len)
        if isinstance(parameter, click.Option) and parameter.is_flag:
            words += [option] if value else []
            continue
        words += [word for one in values if one is not None for word in (option, str(one))]
    return shlex.join(words)


def _machine() -> str:
    """Return the number and name of the processors, and the versions of the packages that do the work."""
    found = (
        (name, version_of(name)) for name in ("tensorflow", "tensorflow-cpu", "keras", "horovod")
    )
    packages = ", ".join(f"{name} {version}" for name, version in found if version)
    return f"{os.cpu_count()} CPUs ({_processor()}), {packages}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
