"""Base class of the commands that start `hvdtrain run` elsewhere, in a batch job or a container."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import click

from hvdtrain.cli.launch_options import SectionedCommand
from hvdtrain.cli.run import run

# They describe this call, not the run.
_NOT_PASSED = {"dry_run", "show_config", "check_build", "version"}
# Would be ambiguous: the GPUs of the job or container, or those of the workers.
_OTHERWISE_MEANT = {"--gpus"}


@dataclass(frozen=True)
class RunPart:
    """The part of a command line that is passed on to `hvdtrain run`.

    Attributes:
        options: Words of its options.
        program: Script and its arguments, with `--` before them if it was typed: in that case they may be arguments of
            the script in a configuration file. Empty if nothing but options was typed.
    """

    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.options, *self.program)

    def read(self, ctx: click.Context) -> click.Context:
        """Parse it as `hvdtrain run` would. Returns the context of that command.

        Args:
            ctx: Context of the command that passes it on.

        Raises:
            click.UsageError, UsageError: `hvdtrain run` would refuse it.
        """
        return run.make_context(ctx.info_name, list(self.words), parent=ctx.parent)


class ThroughRun(SectionedCommand):
    """A command that accepts the options of `hvdtrain run` beside its own, and passes them on.

    `ctx.obj` is the RunPart; the command's function receives its own options only.
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
        given, _, order = self.make_parser(ctx).parse_args(list(typed))
        passed: dict[str, click.Parameter] = {}
        # The first of a name is the option; the others are flags that set it.
        for one in self._passed:
            passed.setdefault(str(one.name), one)
        names = dict.fromkeys(str(one.name) for one in order)
        ctx.obj = RunPart(
            tuple(word for name in names if name in passed for word in _words(passed[name], given)),
            _program(given, typed),
        )
        return rest


def _passed(parameter: click.Parameter, taken: set[str]) -> click.Parameter:
    """Return a copy of the parameter without the names in `taken`; its value is checked elsewhere."""
    other = copy(parameter)
    other.opts = [name for name in parameter.opts if name not in taken]
    other.secondary_opts = [name for name in parameter.secondary_opts if name not in taken]
    other.callback, other.envvar = None, None
    other.expose_value = other.required = other.is_eager = False
    return other


def _words(parameter: click.Parameter, given: Mapping[str, Any]) -> Iterable[str]:
    """Yield the words that set an option to its value."""
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


def _program(given: Mapping[str, Any], typed: list[str]) -> tuple[str, ...]:
    script, arguments = given.get("script"), given.get("arguments")
    if not isinstance(script, str):
        return ()
    words = (script, *(arguments if isinstance(arguments, list | tuple) else ()))
    before = typed[: -len(words)]
    return ("--", *words) if before[-1:] == ["--"] else words
