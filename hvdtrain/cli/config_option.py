"""`--config FILE` and `--show-config`: layers from which a command's options take their values.

The command line takes precedence over the environment (HVDTRAIN_<NAME>), the environment over the
file, and the file over the defaults. Click implements the others; the file becomes its `default_map`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.cli.launch_options import (
    HOSTS,
    NAMES,
    PATH,
    VARIABLE,
    GroupedOption,
    SectionedCommand,
)
from hvdtrain.errors import UsageError
from hvdtrain.launch.config_files import Entry, read_config
from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.option_types import Option, options_of
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.plan_validation import MUTUALLY_EXCLUSIVE, is_given
from hvdtrain.launch.secrets import looks_secret, masked
from hvdtrain.profiled_steps import ProfiledSteps

# Options about a single call, which are not allowed in a file.
NOT_IN_FILES = {"config", "show_config", "dry_run", "help", "help_all"}
_LAYERS = [
    ParameterSource.DEFAULT,
    ParameterSource.DEFAULT_MAP,
    ParameterSource.ENVIRONMENT,
    ParameterSource.COMMANDLINE,
]


def load_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Callback of the eager option --config: make the file's values the command's defaults."""
    if path is not None:
        parameters = _configurable(ctx)
        ctx.default_map = {
            field: _value(path, entry, parameters[field], ctx)
            for field, entry in _entries(path, parameters).items()
        }
    return path


class ConfiguredCommand(SectionedCommand):
    """A command with --config, whose file may name the script. Arguments after -- are passed to that script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not any(word.startswith("--config") for word in typed):
                raise
            message = f"{error.message} If the configuration names the script, put its arguments after --."
            raise click.NoSuchOption(
                error.option_name, message, error.possibilities, error.ctx
            ) from None
        script = (ctx.default_map or {}).get("script")
        if script is not None and _is_typed(ctx, "script"):
            behind = len(ctx.params["arguments"]) if _is_typed(ctx, "arguments") else 0
            at = len(typed) - behind - 1
            if at > 0 and typed[at - 1] == "--":
                ctx.params |= {"script": script, "arguments": tuple(typed[at:])}
                ctx.set_parameter_source("script", ParameterSource.DEFAULT_MAP)
                ctx.set_parameter_source("arguments", ParameterSource.COMMANDLINE)
        return rest


def _is_typed(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def set_indirectly(ctx: click.Context) -> set[str]:
    """Return the options set in a file or a variable, which may be meant for many launches."""
    behind = {ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT}
    return {name for name in ctx.params if ctx.get_parameter_source(name) in behind}


def is_set(ctx: click.Context, name: str) -> bool:
    """Return whether the user has set an option, even to its default."""
    return _rank(ctx, name) > 0


def _entries(path: Path, parameters: Mapping[str, click.Parameter]) -> dict[str, Entry]:
    return read_config(
        path, {name: field for field, one in parameters.items() for name in _key_names(one)}
    )


def without_outranked(ctx: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values, except those that a value from a higher layer makes void.

    With `controller: mpi` and `mpi-args: ...` in the file, `--controller gloo` is not a mistake; nor is
    `--hosts` with a hostfile in the file. Arguments in a file apply only to the script in it.
    """
    values = dict(values)
    own_script = (ctx.default_map or {}).get("script", values["script"])
    if values["script"] != own_script and _rank(ctx, "arguments") < _rank(ctx, "script"):
        values["arguments"] = None
    for rivals in MUTUALLY_EXCLUSIVE:
        given = [name for name in rivals if is_given(values.get(name))]
        for name in given:
            if _rank(ctx, name) < max(_rank(ctx, one) for one in given):
                values[name] = None
    for option in options_of(LaunchPlan):
        switch = _switched_off_by(option, values)
        if switch and _rank(ctx, option.field) < _rank(ctx, switch):
            values[option.field] = None
    return values


def with_variables(ctx: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values, updated from `--env NAME=VALUE` where NAME is Horovod's variable for an option.

    Horovod's launcher uses the option, whose default would override the user's variable.

    Raises:
        UsageError: A variable's value is invalid, or differs from that of the option in the same layer.
    """
    values = dict(values)
    given = {one.name: one.value for one in values["env"] if one.value is not None}
    parameters = {one.name: one for one in ctx.command.params}
    for option in options_of(LaunchPlan):
        variable = option.environment
        text = given.get(variable)
        if text is None:
            continue
        try:
            value = parameters[option.field].type_cast_value(ctx, text)
        except click.BadParameter as error:
            raise UsageError(f"--env {variable}: {error.message}") from None
        # An exported variable is not an option given by the user: --env may override it.
        exported = _set_by(ctx, parameters[option.field]) == variable
        place = 0 if exported else _rank(ctx, option.field)
        if place == _rank(ctx, "env") and value != values[option.field]:
            raise UsageError(
                f"--env {variable}={text} and {option.name} {values[option.field]} set the same "
                "thing to different values: use only one"
            )
        if place <= _rank(ctx, "env"):
            values[option.field] = value
    return values


def _rank(ctx: click.Context, name: str) -> int:
    """Return the precedence of the layer that a value comes from; higher wins."""
    return _LAYERS.index(ctx.get_parameter_source(name) or ParameterSource.DEFAULT)


def _set_by(ctx: click.Context, parameter: click.Parameter) -> str | None:
    """Return the variable that a value comes from, or None."""
    return parameter.variable(ctx) if isinstance(parameter, GroupedOption) else None


def _switched_off_by(option: Option, values: dict[str, Any]) -> str | None:
    """Return the option whose value makes this one void, or None."""
    needs = option.needs
    if "autotune" in needs and values.get("autotune") is False:
        return "autotune"
    other = {"gloo": "mpi", "mpi": "gloo"}.get(values.get("controller", ""), "neither")
    return "controller" if other in needs else None


def config_text(ctx: click.Context) -> str:
    """Format the values of the command's options as a configuration file, each with its source."""
    lines = [
        "# The options of this run, and where each value comes from. Options that are not listed are unset."
    ]
    own = without_outranked(ctx, ctx.params)
    values = with_variables(ctx, own)
    parameters = _configurable(ctx)
    for field, parameter in parameters.items():
        value = values.get(field)
        # False, if it is not the default, was requested.
        is_default = ctx.get_parameter_source(field) is ParameterSource.DEFAULT
        if value is None or (is_default and not is_given(value)):
            continue
        text = _yaml(_plain(field, value))
        source = _source(ctx, parameter if value == own.get(field) else parameters["env"])
        lines.append(f"{_key_names(parameter)[0]}: {text}  # {source}")
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    """Format a value in YAML on one line."""
    import yaml

    text: str = yaml.safe_dump(
        [value], default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False
    )
    return text.strip().removeprefix("[").removesuffix("]")


def _configurable(ctx: click.Context) -> dict[str, click.Parameter]:
    parameters = ctx.command.get_params(ctx)
    found = {
        one.name: one
        for one in parameters
        if one.name and one.name not in NOT_IN_FILES and not getattr(one, "hidden", False)
    }
    order = [
        "script",
        "arguments",
        *(name for name in found if name not in {"script", "arguments"}),
    ]
    return {name: found[name] for name in order if name in found}


def _key_names(parameter: click.Parameter) -> list[str]:
    """Return the keys for the parameter in a file: `np` for -np, otherwise its long names."""
    names = [str(parameter.name).replace("_", "-")]
    names += [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
    return list(dict.fromkeys(names))


def _source(ctx: click.Context, parameter: click.Parameter) -> str:
    match ctx.get_parameter_source(parameter.name or ""):
        case ParameterSource.COMMANDLINE:
            return "command line"
        case ParameterSource.ENVIRONMENT:
            return f"environment: {_set_by(ctx, parameter)}"
        case ParameterSource.DEFAULT_MAP:
            return str(ctx.params["config"])
        case _:
            return "default"


def _plain(field: str, value: Any) -> Any:
    """Convert a value to YAML's types, without secrets."""
    match value:
        case Path():
            return masked([str(value)])[0]
        case (Host(), *_):
            return {host.name: host.slots for host in value}
        case (EnvVar(), *_):
            return {
                one.name: None if looks_secret(one.name, one.value or "") else one.value
                for one in value
            }
        case (str(), *_):
            return masked(value)
        case tuple():
            return list(value)
        case str():
            return masked([value])[0]
        case ProfiledSteps():
            return str(value)
    return value


def _value(path: Path, entry: Entry, parameter: click.Parameter, ctx: click.Context) -> Any:
    """Convert an entry to Click's value. YAML is typed, so the entry must have the right type. Raises UsageError."""
    try:
        value = parameter.type_cast_value(ctx, _typed(entry.value, parameter))
    except _WrongType as error:
        raise UsageError(f"{path}: {entry.key}: {entry.value!r} is invalid: {error}") from None
    except click.BadParameter as error:
        raise UsageError(f"{path}: {entry.key}: {error.message}") from None
    # Paths in horovodrun's sections are relative to the working folder, as in horovodrun.
    if parameter.type is not PATH or "." in entry.key:
        return value
    beside: Path = path.parent / value
    # The script may also be the name of a program or a module.
    return value if parameter.name == "script" and not beside.exists() else beside


class _WrongType(Exception):
    """An entry has the wrong type. The message says what is expected."""


def _typed(value: Any, parameter: click.Parameter) -> Any:
    kind = parameter.type
    if parameter.nargs == -1:
        return [_text(item) for item in _list(value)]
    if kind is VARIABLE:
        return _assignments(value)
    if parameter.nargs > 1:
        items = _list(value)
        if len(items) != parameter.nargs or not all(_is_integer(item) for item in items):
            raise _WrongType(f"expected {parameter.nargs} integers, such as [10, 60]")
        return items
    if kind is HOSTS and isinstance(value, dict):
        if not all(_is_integer(slots) for slots in value.values()):
            raise _WrongType("expected slots for each host, such as {node1: 4, node2: 4}")
        return ",".join(f"{name}:{slots}" for name, slots in value.items())
    if kind is NAMES:
        return [_text(item) for item in value] if isinstance(value, list) else [_text(value)]
    if kind is HOSTS and isinstance(value, list):
        return ",".join(_text(item) for item in value)
    if isinstance(kind, click.types.BoolParamType):
        return _checked(value, isinstance(value, bool), "expected true or false")
    if isinstance(kind, click.types.IntParamType):
        return _checked(value, _is_integer(value), "expected an integer")
    if isinstance(kind, click.types.FloatParamType):
        is_number = isinstance(value, int | float | str) and not isinstance(value, bool)
        return _checked(value, is_number, "expected a number")  # PyYAML parses 1e-3 as a string.
    return _checked(value, isinstance(value, str), "expected a string; put it in quotes")


def _assignments(value: Any) -> list[str]:
    """Return `NAME=VALUE` for each variable of a mapping, or of a list of such strings."""
    if not isinstance(value, dict):
        return [_text(item) for item in _list(value)]
    return [str(name) if one is None else f"{name}={_text(one)}" for name, one in value.items()]


def _list(value: Any) -> list[Any]:
    return _checked(value, isinstance(value, list), "expected a list, such as [a, b]")


def _text(value: Any) -> str:
    return str(_checked(value, isinstance(value, str), "put each string in quotes"))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(value: Any, fits: bool, advice: str) -> Any:
    if not fits:
        raise _WrongType(advice)
    return value
