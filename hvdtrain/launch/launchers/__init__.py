"""Launchers, which start the processes of a launch: one file per launcher, and one line here.

Another package adds a launcher by an entry point of the group `hvdtrain.launchers` (docs/adding-a-launcher.md), with
the name for --launcher and a function `prepare(plan, site) -> Prepared`, which is loaded when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from hvdtrain.errors import UsageError, did_you_mean
from hvdtrain.launch.launch_command import Prepared, Site
from hvdtrain.launch.plan import LaunchPlan

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Prepare = Callable[[LaunchPlan, Site], Prepared]

LAUNCHERS = {
    "horovodrun": "hvdtrain.launch.launchers.horovodrun",
    "srun": "hvdtrain.launch.launchers.srun",
}
"""What --launcher takes -> the module whose `prepare` it means. The other modules here are for --strategy."""
GROUP = "hvdtrain.launchers"


def launcher_names() -> list[str]:
    """The names of the installed launchers."""
    return [*LAUNCHERS, *sorted(_entry_points().keys() - LAUNCHERS.keys())]


def find_launcher(name: str) -> Prepare:
    """A launcher's `prepare`. Raises UsageError if no launcher has this name, or it cannot be loaded."""
    if name in LAUNCHERS:
        prepare: Prepare = import_module(LAUNCHERS[name]).prepare
        return prepare
    entry = _entry_points().get(name)
    if entry is None:
        names = launcher_names()
        hint = did_you_mean(name, names) or f" Choose from {', '.join(names)}."
        raise UsageError(f"--launcher {name}: no such launcher.{hint}")
    try:
        found = entry.load()
    except Exception as error:
        raise UsageError(
            f"--launcher {name}: {entry.value} cannot be loaded ({type(error).__name__}: {error}): "
            f"repair {_distribution(entry)}, which provides it, or choose another launcher"
        ) from error
    if not callable(found):
        raise UsageError(
            f"--launcher {name}: {entry.value} is not a function prepare(plan, site): "
            f"repair {_distribution(entry)}, which provides it"
        )
    return cast(Prepare, found)


def _entry_points() -> dict[str, EntryPoint]:
    """Those of all installed distributions, by name. Takes some 10 ms, so it is asked for late."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "the distribution"
