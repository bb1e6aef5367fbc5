"""`hvdtrain new`: copy a script and a configuration to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from hvdtrain.errors import did_you_mean
from hvdtrain.starters import CONFIG, STARTERS, copy


def _complete_name(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [
        CompletionItem(name, help=starter.shows)
        for name, starter in STARTERS.items()
        if name.startswith(incomplete)
    ]


@click.command()
@click.argument("name", required=False, shell_complete=_complete_name)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=Path())
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def new(name: str | None, folder: Path, force: bool) -> None:
    """Copy a training script and its run.yaml into FOLDER (default: the current folder), to edit.

    Without NAME, list the scripts.
    """
    if name is None:
        width = max(map(len, STARTERS))
        for starter in STARTERS.values():
            click.echo(f"{starter.name:<{width}}  {starter.shows}")
        click.echo("\nCopy one with: hvdtrain new NAME [FOLDER]")
        return
    if name not in STARTERS:
        hint = did_you_mean(name, STARTERS)
        raise click.UsageError(f"No script '{name}': choose from {', '.join(STARTERS)}.{hint}")
    for path in copy(STARTERS[name], folder, force=force):
        click.echo(f"Wrote {path}")
    change = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    click.echo(f"Train with: {change}hvdtrain run --config {CONFIG}")
