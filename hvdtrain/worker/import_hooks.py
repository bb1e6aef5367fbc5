"""Do something with a module as soon as the script has imported it, without importing it oneself."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

Hooks = Mapping[str, Callable[[ModuleType], None]]
"""Name of a module -> what to do with it once it is loaded, before the importer sees it."""


class _Finder:
    """A finder of sys.meta_path that finds nothing itself, and wraps the loaders of some modules."""

    def __init__(self, hooks: Sequence[Hooks]) -> None:
        self._hooks = hooks

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called by Python for every module that is imported."""
        wanted = [hooks[name] for hooks in self._hooks if name in hooks]
        if not wanted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                load(module)
                for tell in wanted:
                    tell(module)

            spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


def on_import(*hooks: Hooks) -> None:
    """Call the hooks for the modules that are imported from here on, in this order."""
    sys.meta_path.insert(0, _Finder(hooks))
