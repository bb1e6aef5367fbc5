"""The interface of a tracker: three methods, and the facts about the run that it receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hvdtrain.errors import UsageError


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that a tracker receives.

    Attributes:
        run_dir: Folder of the run; None if the Trainer has none.
        id: Return value of an earlier `start` for this run; None if the run is new.
        config: Settings and versions, as in config.json. Settings may be nested.
        host: Name of rank 0's host.
    """

    run_dir: Path | None
    id: str | None
    config: Mapping[str, Any]
    host: str

    @property
    def name(self) -> str | None:
        """Name of the run: that of its folder; None without one."""
        return None if self.run_dir is None else self.run_dir.resolve().name


@runtime_checkable
class Tracker(Protocol):
    """Interface of a tracker for `Trainer(trackers=[...])`: any class with these methods.

    The methods are called on rank 0 only, from a separate thread, so they may be slow. A call that raises an exception
    is repeated later; subsequent calls wait for it.
    """

    def start(self, run: RunFacts) -> str | None:
        """Start `run`, or continue it if it has an id; return its id, which is stored in the run_dir."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values by name.

        Args:
            values: Values of an epoch, or of steps within it if their names begin with "step/".
            step: Number of steps trained so far, over all epochs.
        """

    def end(self, status: str) -> None:
        """End the run; `status` is "finished", "failed" or "interrupted"."""


def require_package(package: str, tracker: str) -> None:
    """Raise UsageError if a tracker's package is not installed. Does not import it."""
    if find_spec(package) is None:
        raise UsageError(
            f"the tracker {tracker} needs {package}: pip install 'hvdtrain[{package}]'"
        )
