"""Which layer an option's value comes from: command line, environment, configuration file or default."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_config_files import call, shown

from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.option_types import Option, options_of
from hvdtrain.launch.plan import LaunchPlan

# What decides over other options, and what comes in several forms, has its tests above.
DECIDING = {"controller", "launcher", "autotune", "env", "host_discovery_script", "torus_allreduce"}
SETTINGS = [option for option in options_of(LaunchPlan) if option.field not in DECIDING]
TEXT = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=9
).filter(lambda text: text.strip() == text and not text.startswith("~"))
NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True), min_size=1, max_size=3)


def values_of(option: Option) -> st.SearchStrategy[Any]:
    """Values as YAML has them."""
    kind = option.type
    if get_origin(kind) is not tuple and get_origin(kind) is not Literal and get_args(kind):
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    least, most = int(option.least or 0), int(option.most or 10**6)
    strategies: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(least, most),
        float: st.floats(least, most),
        str: TEXT,
        Path: TEXT.map(lambda text: str(Path(text))),
        tuple[int, int]: st.lists(st.integers(least, most), min_size=2, max_size=2),
        tuple[Host, ...]: st.dictionaries(
            st.from_regex(r"[a-z][a-z0-9.-]{0,9}", fullmatch=True), st.integers(1, 99), min_size=1
        ),
        tuple[str, ...]: NAMES,
    }
    assert kind != tuple[EnvVar, ...]
    return strategies[kind]


def as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{slots}" for name, slots in value.items())
    if isinstance(value, list):
        return (" " if isinstance(value[0], int) else ",").join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_words(option: Option, value: Any) -> list[str]:
    name = option.names[0]
    if isinstance(value, bool):
        on, _, off = name.partition("/")
        if option.default is False:
            return [on] if value else []
        return [on if value else off or f"--no-{on.removeprefix('--')}"]
    if isinstance(value, list) and isinstance(value[0], int):
        return [name, *map(str, value)]
    return [f"{name}={as_text(value)}"] if name.startswith("--") else [name, as_text(value)]


@st.composite
def layers(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Some options, with values in the file, the environment and at the command line."""
    chosen = draw(st.lists(st.sampled_from(SETTINGS), unique_by=lambda one: one.field, max_size=6))
    found: list[dict[str, Any]] = [{}, {}, {}]
    for option in chosen:
        for layer in found:
            if draw(st.booleans()):
                layer[option.field] = draw(values_of(option))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=layers(), dashes=st.booleans())
def test_command_line_before_environment_before_file_before_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: list[dict[str, Any]], dashes: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    in_file, in_environment, at_command_line = layers
    by_field = {option.field: option for option in SETTINGS}
    separator = "-" if dashes else "_"
    content = {field.replace("_", separator): value for field, value in in_file.items()}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    words = [
        word for name, value in at_command_line.items() for word in as_words(by_field[name], value)
    ]
    environment = {
        f"HVDTRAIN_{name.upper()}": as_text(value) for name, value in in_environment.items()
    }
    seen = shown("--config", "run.yaml", *words, "train.py", **environment)
    for field in in_file.keys() | in_environment.keys() | at_command_line.keys():
        option = by_field[field]
        if field in at_command_line and as_words(option, at_command_line[field]):
            expected, source = at_command_line[field], "command line"
        elif field in in_environment:
            expected, source = in_environment[field], f"environment: HVDTRAIN_{field.upper()}"
        elif field in in_file:
            expected, source = in_file[field], "run.yaml"
        else:
            continue
        assert seen[field.replace("_", "-")] == (expected, source)
    # What was shown is a configuration file that says the same.
    (tmp_path / "again.yaml").write_text(
        call("--show-config", "--config", "run.yaml", *words, "train.py", **environment).stdout,
        encoding="utf-8",
    )
    again = shown("--config", "again.yaml")
    assert {key: value for key, (value, _) in again.items()} == {
        key: value for key, (value, _) in seen.items()
    }
