"""Launchers, which start the processes of a launch: one file per launcher, registered here.

Another package adds a launcher as an entry point in the group `hvdtrain.launchers` (docs/adding-a-launcher.md). Its
name is the value for --launcher; it refers to a function `prepare(plan, site) -> LaunchCommand`, loaded on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from hvdtrain.errors import UsageError, did_you_mean
from hvdtrain.launch.launch_command import LaunchCommand, Site
from hvdtrain.launch.plan import LaunchPlan

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Prepare = Callable[[LaunchPlan, Site], LaunchCommand]

LAUNCHERS = {
    "horovodrun": "hvdtrain.launch.launchers.horovodrun",
    "srun": "hvdtrain.launch.launchers.srun",
}
"""Value of --launcher -> module with the `prepare` function. The other modules here serve --strategy."""
GROUP = "hvdtrain.launchers"


def launcher_names() -> list[str]:
    """Return the names of the installed launchers."""
    return [*LAUNCHERS, *sorted(_entry_points().keys() - LAUNCHERS.keys())]


def find_launcher(name: str) -> Prepare:
    """Return the `prepare` function of a launcher. Raises UsageError if it does not exist or cannot be loaded."""
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
    """Return the launchers of all installed distributions, by name. Takes some 10 ms, so it is called lazily."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "the distribution"
