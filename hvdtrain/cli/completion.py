"""`hvdtrain completion`: print the script with which a shell completes hvdtrain's commands and options."""

from __future__ import annotations

import os
from pathlib import PurePath

import click
from click.shell_completion import get_completion_class

VARIABLE = "_HVDTRAIN_COMPLETE"
"""Variable that the shell sets to request completions, by Click's protocol."""
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", required=False, type=click.Choice(SHELLS))
def completion(shell: str | None) -> None:
    """Print the completion script for a shell (default: $SHELL).

    \b
    bash  hvdtrain completion bash > ~/.local/share/bash-completion/completions/hvdtrain
    zsh   hvdtrain completion zsh > ~/.zfunc/_hvdtrain
          with this in ~/.zshrc:  fpath+=~/.zfunc; autoload -Uz compinit; compinit
    fish  hvdtrain completion fish > ~/.config/fish/completions/hvdtrain.fish

    Create the folder first if it does not exist, then open a new shell. For the current shell only (bash, zsh):
    source <(hvdtrain completion bash).
    """
    name = shell or PurePath(os.environ.get("SHELL", "")).name
    made = get_completion_class(name) if name in SHELLS else None
    if made is None:
        raise click.UsageError(f"Specify a shell: {', '.join(SHELLS)}.")
    root = click.get_current_context().find_root().command
    click.echo(made(root, {}, "hvdtrain", VARIABLE).source())
