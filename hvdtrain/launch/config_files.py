"""Read configuration files: YAML with option names as keys, or in Horovod's layout.

    script: train.py
    arguments: [--epochs, 5]
    np: 8
    hosts: {node1: 4, node2: 4}
    fusion-threshold-mb: 64       # or fusion_threshold_mb

The sections of `horovodrun --config-file` (params, autotune, timeline, stall_check,
library_options, logging) may appear alongside these. An unknown key is an error; horovodrun
ignores it. Paths are relative to the file's folder, but those in Horovod's sections are relative to
the working folder, as in horovodrun.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import UsageError, did_you_mean
from hvdtrain.launch.user_files import read_text

_TUNING = ("fusion_threshold_mb", "cycle_time_ms", "cache_capacity")
_TOPOLOGY = ("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce")
_LIBRARIES = ("mpi_threads_disable", "num_nccl_streams", "thread_affinity", "gloo_timeout_seconds")
_SEARCH = (
    "log_file",
    "warmup_samples",
    "steps_per_sample",
    "bayes_opt_max_samples",
    "gaussian_process_noise",
)
# Section in Horovod's layout -> key -> field of the plan.
HOROVOD_SECTIONS: dict[str, dict[str, str]] = {
    "params": {name: name for name in (*_TUNING, *_TOPOLOGY)},
    "autotune": {"enabled": "autotune", **{name: f"autotune_{name}" for name in _SEARCH}},
    "timeline": {"filename": "timeline_filename", "mark_cycles": "timeline_mark_cycles"},
    "stall_check": {
        "enabled": "stall_check",
        "warning_time_seconds": "stall_warning_seconds",
        "shutdown_time_seconds": "stall_shutdown_seconds",
    },
    "library_options": {name: name for name in _LIBRARIES},
    "logging": {"level": "log_level", "with_timestamp": "log_with_timestamp"},
}
# Always strings, for the script and the environment: 1.10 must not become 1.1, nor `no` a boolean.
_AS_WRITTEN = {"arguments", "env"}
# What no argument, variable or path can contain.
_NO_ARGUMENT = re.compile("[\0\ud800-\udfff]")
_TEXT = "tag:yaml.org,2002:str"
# Section -> its switch, and whether Horovod applies the rest of the section when the switch is absent.
_SWITCHES = {"autotune": ("enabled", False), "timeline": ("filename", False)}


class Entry(NamedTuple):
    """One value of a configuration file, as parsed by YAML, and its key as written: autotune.enabled in a section."""

    key: str
    value: Any


def read_config(path: Path, fields: Mapping[str, str]) -> dict[str, Entry]:
    """Read the entries of a configuration file, keyed by field. A key without a value is ignored.

    Args:
        path: Path of the file.
        fields: Mapping from each valid key, written with `-`, to its field.

    Raises:
        UsageError: The file cannot be read, has unknown keys, or sets an option twice.
    """
    found: dict[str, Entry] = {}
    for field, entry in _entries(path, _load(path), fields):
        if field in found:
            raise UsageError(
                f"{path}: {found[field].key} and {entry.key} are the same option: use only one"
            )
        found[field] = entry
    return {field: entry for field, entry in found.items() if entry.value is not None}


def _entries(
    path: Path, content: Mapping[str, Any], fields: Mapping[str, str]
) -> Iterator[tuple[str, Entry]]:
    sections = {name.replace("_", "-"): name for name in HOROVOD_SECTIONS}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name in sections and (isinstance(value, dict) or name not in fields):
            yield from _section_entries(path, key, sections[name], value)
        elif name in fields:
            yield fields[name], Entry(key, value)
        else:
            hint = did_you_mean(name, [*fields, *sections])
            raise UsageError(f"{path}: there is no option {key!r}.{hint}")


def _section_entries(
    path: Path, key: str, section: str, content: Any
) -> Iterator[tuple[str, Entry]]:
    """Yield the entries of a section in Horovod's layout."""
    if content is None:
        return
    if not isinstance(content, dict):
        raise UsageError(f"{path}: {key} is a section: put its keys below it, indented")
    known = HOROVOD_SECTIONS[section]
    for name in content:
        if name not in known:
            raise UsageError(
                f"{path}: there is no key {name!r} in {key}.{did_you_mean(name, known)}"
            )
    switch, otherwise = _SWITCHES.get(section, ("", True))
    # As in Horovod, a section that is switched off has no effect.
    active = bool(content.get(switch, otherwise)) or not switch
    for name, value in content.items():
        if active or name == switch:
            yield known[name], Entry(f"{key}.{name}", value)


def _load(path: Path) -> dict[str, Any]:
    """Parse the file into a mapping."""
    import yaml  # Imported here so that only runs with a configuration file pay for it.

    text = read_text(path, "configuration")
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if _NO_ARGUMENT.search(getattr(event, "value", "")):
                line = event.start_mark.line + 1
                raise UsageError(
                    f"{path}, line {line}: a string cannot contain a NUL byte, or half of a surrogate pair"
                )
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"{path}: expected one option per line, such as np: 4")
        _take_keys(path, root)
        for key, node in root.value:
            if key.value in _AS_WRITTEN:
                _take_as_written(node)
        content: dict[str, Any] = loader.construct_document(root)
    except yaml.YAMLError as error:
        raise UsageError(f"the configuration {path} is not valid YAML: {_place(error)}") from error
    except UsageError:
        raise
    except ValueError as error:  # For example 2024-13-45, which PyYAML parses as a date.
        raise UsageError(
            f"cannot read the configuration {path}: {error}: put strings in quotes"
        ) from error
    except RecursionError as error:
        raise UsageError(f"the configuration {path} is nested too deeply") from error
    return content


def _take_keys(path: Path, node: Any) -> None:
    """Make all keys strings (even `ON`) and reject duplicate keys.

    PyYAML would silently use the last of two equal keys.
    """
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key.value, str):
            raise UsageError(f"{path}, line {key.start_mark.line + 1}: a key must be a single word")
        if key.value in seen:
            raise UsageError(f"{path}: {key.value!r} appears twice: keep only one")
        seen.add(key.value)
        key.tag = _TEXT
        if value.id == "mapping":
            _take_keys(path, value)


def _take_as_written(node: Any) -> None:
    """Turn the scalars in a list or a mapping into strings, except nulls."""
    if node.id == "scalar":
        return
    for item in node.value:
        value = item[1] if node.id == "mapping" else item
        if value.id == "scalar" and not value.tag.endswith(":null"):
            value.tag = _TEXT


def _place(error: Any) -> str:
    """Format PyYAML's message on one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + " ".join(str(problem or error).split())
