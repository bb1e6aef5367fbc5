"""The top-level group, whose commands are imported when they are called.

`hvdtrain --help` imports nothing but Click: the names of the commands and their one-line descriptions
are in a table.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.environment import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE
from hvdtrain.signals import heed_children, interruptible
from hvdtrain.standard_streams import open_streams

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EXIT_CODES = (
    "Exit codes: 0 success; 1 run-time error; 2 usage error; 75 saved and stopped on request; 124 the run hung; 130 "
    "ended by Ctrl-C; 143 ended by SIGTERM, or because its output is no longer read; otherwise the exit code of the "
    "worker that failed first (128 + the signal's number if a signal ended it)."
)

# A full disk or quota, the file size limit, a device that has gone.
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
# A name that is too long or leads nowhere, or a folder that may not be searched.
_IMPOSSIBLE = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES}

# name -> description. Each is a function in the module with its name, where - stands for _.
COMMANDS = {
    "bench": "Measure throughput, start-up, memory and pipelines.",
    "completion": "Print the completion script for your shell.",
    "docker": "Run a training script on several workers in a container.",
    "doctor": "Check whether this machine can train, and suggest fixes.",
    "estimate": "Estimate the memory and traffic of a training run in advance.",
    "install-horovod": "Build Horovod for the TensorFlow of this environment.",
    "logs": "Show the output of a run, a Slurm job or a container.",
    "new": "Copy a training script and its configuration, to edit.",
    "ps": "List running jobs, with phase and step.",
    "report": "Write an HTML report of training runs.",
    "run": "Run a training script on several workers.",
    "stop": "End a run, a Slurm job or a container.",
    "strategies": "List the strategies and which of them work here.",
    "submit": "Run a training script as a Slurm job.",
    "timeline": "Summarize a Horovod timeline.",
    "top": "Watch a training run from another terminal.",
    "verify": "Check that N workers train like one.",
}


class CommandTable(click.Group):
    """A group that lists its commands from a table, and imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"hvdtrain.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete from the table, as Click would import every command for its help."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=COMMANDS[name]) for name in names]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name.endswith(".py"):
            raise click.UsageError(
                f"No such command {name!r}. Did you mean 'hvdtrain run {name}'?", ctx
            )
        if name not in COMMANDS and not name.startswith("-"):
            raise click.NoSuchCommand(name, possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run with whatever streams and signals this process inherited.

        If the output cannot be written, exit with one message. As for all programs, a closed pipe is not an error.
        """
        open_streams()
        heed_children()
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            # Errors of opening or reading name their file; those of writing the output do not.
            if error.filename is not None or error.errno not in _UNWRITABLE:
                raise
            with suppress(OSError):
                click.echo(f"Error: cannot write the output: {error.strerror}", err=True)
            # At exit, Python flushes what could not be written.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            sys.exit(EXIT_FAILURE)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Errors of hvdtrain, and of files, exit with one message and their exit code."""
        from hvdtrain.errors import HvdtrainError

        try:
            os.getcwd()  # noqa: PTH109
        except FileNotFoundError:
            click.echo(
                "Error: the working folder has been deleted: change to another one", err=True
            )
            ctx.exit(EXIT_USAGE)

        if os.environ.get("NO_COLOR"):  # See no-color.org; Click itself ignores it.
            ctx.color = False
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Click would exit with 1, the code of a failure.
            click.echo("\nInterrupted.", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except HvdtrainError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            # Of a name in the options: before Python 3.14, even Path.exists raises these.
            if error.filename is None or error.errno not in _IMPOSSIBLE:
                raise
            click.echo(f"Error: {error.filename}: {error.strerror}", err=True)
            ctx.exit(EXIT_USAGE)


def _print_version(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from hvdtrain.cli.version import version_text

        click.echo(version_text(os.environ))
        ctx.exit()


@click.group(
    cls=CommandTable,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version,
    help="Show the versions of hvdtrain and its dependencies, for bug reports, and exit.",
)  # fmt: skip
@click.pass_context
def main(ctx: click.Context) -> None:
    """Multi-worker training for TensorFlow and Keras 3, on Horovod."""
    # Click calls this after importing the command, which starts now.
    ctx.with_resource(interruptible())
