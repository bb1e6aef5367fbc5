"""Commands that have `hvdtrain run` done elsewhere, in a batch job or a container: they take all of its
options beside their own, and pass them on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import click

from hvdtrain.cli.launch_options import SectionedCommand
from hvdtrain.cli.run import run

# About the one call that has them.
_NOT_PASSED = {"dry_run", "show_config", "check_build", "version"}
# Here it could be meant for the GPUs of the job or of the container.
_OTHERWISE_MEANT = {"--gpus"}


@dataclass(frozen=True)
class RunPart:
    """The part of a command line that is for `hvdtrain run`.

    Attributes:
        options: as words.
        program: the script and its arguments, as words; the script may be in a configuration file.
    """

    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        dashes = ("--",) if self.program and self.program[0].startswith("-") else ()
        return (*self.options, *dashes, *self.program)

    def read(self, ctx: click.Context) -> click.Context:
        """What `hvdtrain run` reads in it, in its own context. Raises click.UsageError or UsageError.

        Args:
            ctx: of the command that passes it on.
        """
        return run.make_context(ctx.info_name, list(self.words), parent=ctx.parent)


class ThroughRun(SectionedCommand):
    """A command that passes the options of `hvdtrain run` on, but for those that it has itself.

    `ctx.obj` is the RunPart; what the command's function gets are its own options.
    """

    allow_interspersed_args = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = {one.name for one in self.params}
        names = {name for one in self.params for name in (*one.opts, *one.secondary_opts)}
        self._passed = [
            _passed(one, names | _OTHERWISE_MEANT)
            for one in run.params
            if one.name not in own | _NOT_PASSED
        ]
        self.params += self._passed

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        rest = super().parse_args(ctx, args)
        given, _, order = self.make_parser(ctx).parse_args(typed)
        passed: dict[str, click.Parameter] = {}
        for one in self._passed:  # The first of a name is the option, others are flags that set it.
            passed.setdefault(str(one.name), one)
        names = dict.fromkeys(str(one.name) for one in order)
        ctx.obj = RunPart(
            tuple(word for name in names if name in passed for word in _words(passed[name], given)),
            tuple(_program(given)),
        )
        return rest


def _passed(parameter: click.Parameter, taken: set[str]) -> click.Parameter:
    """The parameter as one that is read elsewhere, and has none of the names that are taken."""
    other = copy(parameter)
    other.opts = [name for name in parameter.opts if name not in taken]
    other.secondary_opts = [name for name in parameter.secondary_opts if name not in taken]
    other.callback, other.envvar = None, None
    other.expose_value = other.required = other.is_eager = False
    return other


def _words(parameter: click.Parameter, given: Mapping[str, Any]) -> Iterable[str]:
    """The words that give an option its value."""
    if not isinstance(parameter, click.Option):
        return
    value = given[str(parameter.name)]
    if isinstance(value, bool):
        yield (parameter.opts if value else parameter.secondary_opts)[0]
        return
    for one in value if parameter.multiple else [value]:
        words = [parameter.opts[0], *([one] if isinstance(one, str) else one)]
        if words[1].startswith("-") and words[0].startswith("--"):
            yield "=".join(words)
        else:
            yield from words


def _program(given: Mapping[str, Any]) -> Sequence[str]:
    script, arguments = given.get("script"), given.get("arguments")
    if not isinstance(script, str):
        return ()
    return (script, *(arguments if isinstance(arguments, list | tuple) else ()))
