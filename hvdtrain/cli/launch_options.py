"""Options of a launch as Click options, in sections.

They are generated from the fields of `LaunchPlan` (see `hvdtrain.launch.option_types`), so that an
option's name, type and help are defined once.
"""

from __future__ import annotations

import math
import os
import shlex
import types
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import click
from click.core import ParameterSource

from hvdtrain.cli.hints import instead
from hvdtrain.errors import UsageError
from hvdtrain.launch.env_forwarding import EnvVar, parse_variable
from hvdtrain.launch.hosts import Host, parse_hosts
from hvdtrain.launch.launchers import LAUNCHERS, launcher_names
from hvdtrain.launch.option_types import GROUPS, Option, options_of
from hvdtrain.launch.plan import LaunchPlan

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Fields with an additional choice on the command line, which is resolved before the plan exists.
_WITH_AUTO = {"controller", "launcher"}
_IN_SHORT_HELP = {"own", "basic", "strategy", "hosts", "about"}
_ALL = "hvdtrain.help_all"


class GroupedOption(click.Option):
    """An option with a section of --help, and with aliases that --help does not show.

    Each long name that is not an alias also has an environment variable, HVDTRAIN_<NAME>.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        group: str,
        environment: str = "",
        aliases: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__([*names, *aliases], **kwargs)
        self.group = group
        self._aliases = {name for alias in aliases for name in alias.split("/")}
        fields = [str(self.name), *(name[2:] for name in self.shown if name.startswith("--"))]
        own = dict.fromkeys(f"HVDTRAIN_{one.replace('-', '_').upper()}" for one in fields)
        self.envvar = [*own, *([environment] if environment else [])]

    @property
    def shown(self) -> list[str]:
        """Names to show in --help."""
        return [name for name in self.opts if name not in self._aliases]

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the option's names, or the variable that its value comes from."""
        if ctx is not None and (variable := self.variable(ctx)):
            return variable
        return " / ".join(f"'{name}'" for name in self.shown)

    def variable(self, ctx: click.Context) -> str | None:
        """Return the environment variable that the value comes from, or None."""
        if ctx.get_parameter_source(self.name or "") is not ParameterSource.ENVIRONMENT:
            return None
        return next(name for name in self.envvar or () if os.environ.get(name))

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        other = copy(self)
        other.opts = self.shown
        other.secondary_opts = [one for one in self.secondary_opts if one not in self._aliases]
        return super(GroupedOption, other).get_help_record(ctx)


class SectionedCommand(click.Command):
    """A command whose --help shows options by section, those without one first; --help-all shows all sections.

    It gives hints for options of other launchers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            GroupedOption(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                group="about",
                callback=_show_all_help,
                help="Show all options and exit.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            advice = instead(error.option_name)
            if not advice:
                raise
            message = f"No such option '{error.option_name}': {advice}."
            raise click.NoSuchOption(error.option_name, message, None, error.ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        left_out = []
        for group, title in {"own": "Options", **GROUPS}.items():
            rows = [
                row
                for one in options
                if self._group(ctx, one) == group and (row := one.get_help_record(ctx))
            ]
            if rows and (group in _IN_SHORT_HELP or ctx.meta.get(_ALL)):
                with formatter.section(title):
                    formatter.write_dl(rows)
            elif rows:
                left_out.append(title)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"More with --help-all: {', '.join(left_out)}.")

    def _group(self, ctx: click.Context, option: click.Option) -> str:
        """Return the section of an option in --help."""
        if isinstance(option, GroupedOption):
            return option.group
        return "about" if option is self.get_help_option(ctx) else "own"


def _show_all_help(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class Parsed(click.ParamType):
    """A parameter type that uses one of hvdtrain's parsers."""

    def __init__(self, name: str, kind: type, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._kind = kind
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, self._kind):
            return value
        try:
            return self._parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Variables(Parsed):
    """Environment variables. HVDTRAIN_ENV contains them as shell words: A=1 'B=x y'."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        try:
            return shlex.split(rv)
        except ValueError as error:
            raise UsageError(f"HVDTRAIN_ENV: {str(error).lower()}") from None


class LauncherChoice(click.Choice[str]):
    """The name of a launcher. Those of other distributions are searched for only when needed."""

    def __init__(self) -> None:
        super().__init__(["auto", *LAUNCHERS])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices:
            return value
        return self._of_all().convert(value, param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return self._of_all().get_metavar(param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return self._of_all().shell_complete(ctx, param, incomplete)

    def _of_all(self) -> click.Choice[str]:
        return click.Choice(["auto", *launcher_names()])


def expanded(text: str) -> Path:
    """Return a path with ~ expanded to the home folder, as no shell does that in files and variables."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # `~name` of a user who does not exist is an ordinary name, as in a shell.
        return Path(text)


class Seconds(click.FloatRange):
    """A duration. Rejects `nan` and `inf`, which Python parses as numbers."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return seconds


class FilePath(Parsed):
    """A path with shell completion."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return files_here(ctx, param, incomplete)


def files_here(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave completion to the shell, which knows the files."""
    from click.shell_completion import CompletionItem  # Not needed to start a run.

    return [CompletionItem(incomplete, type="file")]


PATH = FilePath("path", Path, expanded)
HOSTS = Parsed("hosts", tuple, parse_hosts)
NAMES = Parsed("names", tuple, lambda text: tuple(name.strip() for name in text.split(",")))
LAUNCHER = LauncherChoice()
VARIABLE = Variables("variable", EnvVar, parse_variable)


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options of every field of `LaunchPlan`."""
    for about in reversed(options_of(LaunchPlan)):
        for option in reversed(_click_options(about)):
            command = option(command)
    return command


def grouped(group: str, *names: str, **details: Any) -> Callable[[Any], Any]:
    """Decorate a command with an option in a section of --help."""
    return click.option(*names, cls=GroupedOption, group=group, **details)


def flag(group: str, *names: str, help: str) -> Callable[[Any], Any]:
    """Decorate a command with a flag in a section of --help."""
    return grouped(group, *names, is_flag=True, help=help)


def _click_options(about: Option) -> list[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return decorators for the option, and for a flag per alias of its choices."""
    details: dict[str, Any] = {
        "cls": GroupedOption,
        "group": about.group,
        "environment": about.environment,
        "help": _help(about),
        "metavar": about.metavar,
        "default": "auto" if about.field in _WITH_AUTO else about.default or None,
        "show_default": True,
    }
    names = about.names
    if about.is_switch:
        details |= {"default": about.default, "metavar": None}
        if about.default is False:
            details |= {"is_flag": True, "show_default": False}
        elif "/" not in names[0]:
            names = (f"{names[0]}/--no-{names[0].removeprefix('--')}",)
    else:
        details |= _type(about)
    if not isinstance(details.get("type"), click.Choice):
        return [click.option(*names, about.field, aliases=about.aliases, **details)]
    flags = [
        click.option(
            name,
            about.field,
            flag_value=name.removeprefix("--"),
            hidden=True,
            help=f"{about.name} {name.removeprefix('--')}",
        )
        for name in about.aliases
    ]
    return [click.option(*names, about.field, **details), *flags]


def _all_names(
    _: click.Context, __: click.Parameter, values: Sequence[tuple[str, ...]]
) -> tuple[str, ...]:
    """Flatten the names of an option that was given several times."""
    return tuple(name for names in values for name in names)


def _help(about: Option) -> str:
    unset = about.unset
    return about.help + (f"  [default: {unset}]" if unset else "")


def _type(about: Option) -> dict[str, Any]:
    """Return Click's arguments for the type of a field."""
    kind = about.type
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Literal:
        auto = ("auto",) if about.field in _WITH_AUTO else ()
        return {"type": click.Choice([*auto, *get_args(kind)], case_sensitive=False)}
    if about.field == "launcher":
        return {"type": LAUNCHER}
    if kind == tuple[EnvVar, ...]:
        return {"type": VARIABLE, "multiple": True}
    if kind == tuple[str, ...]:
        return {"type": NAMES, "multiple": True, "callback": _all_names}
    if kind == tuple[int, int]:
        return {"type": int, "nargs": 2}
    return {
        "type": {
            int: int,
            float: float,
            str: str,
            Path: PATH,
            tuple[Host, ...]: HOSTS,
        }[kind]
    }
