"""`hvdtrain new`: a script to start from, copied or made from one of the user's own."""

from __future__ import annotations

import difflib
import shlex
import tokenize
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from hvdtrain.errors import UsageError, did_you_mean
from hvdtrain.starters import CONFIG, STARTERS, copy
from hvdtrain.starters.explicit_script import explicit


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
@click.option(
    "--from", "script", metavar="SCRIPT", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Print the changes that make SCRIPT, an ordinary Keras script, one for hvdtrain.",
)  # fmt: skip
def new(name: str | None, folder: Path, force: bool, script: Path | None) -> None:
    """Copy a training script and its run.yaml into FOLDER (default: the current folder), to edit.

    Without NAME, list the scripts. --from prints a diff for patch, and on stderr what is left to you.
    """
    if script is not None:
        if name is not None:
            raise click.UsageError("--from takes no NAME: it prints the changes of one script.")
        _print_changes(script)
        return
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


def _print_changes(script: Path) -> None:
    """Print a script's diff, and notes.

    Raises:
        UsageError: It is not a Python script, or nothing in it can be changed.
    """
    try:
        with tokenize.open(script) as file:
            text = file.read()
        found = explicit(text)
    except UsageError as error:
        raise UsageError(f"{script}: {error}") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{script} is not a Python script: {error}") from None
    before, after = (one.splitlines(keepends=True) for one in (text, found.text))
    changes = difflib.unified_diff(before, after, str(script), str(script))
    click.echo("".join(map(_ended, changes)), nl=False)
    for note in found.notes:
        click.echo(f"{script}:{note.line}: {note.text}", err=True)
    if not found.fits:
        raise UsageError(f"{script} has no model.fit that could become one of an hvdtrain.Trainer")


def _ended(line: str) -> str:
    """Return a line of a diff as patch wants the last line of a file that ends without a newline."""
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
