"""The end of each `hvdtrain bench` command: how to repeat it, and `--output`, a file with what it has measured."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from hvdtrain.bench.figures import SUFFIXES, Figure, Findings
from hvdtrain.errors import UsageError
from hvdtrain.install.build_environment import version_of
from hvdtrain.report.drawing import check_output

_OUTPUT = "hvdtrain.bench.output"


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
