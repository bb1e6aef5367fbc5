"""Run hooks on modules as soon as the script has imported them, without importing them beforehand."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

Hooks = Mapping[str, Callable[[ModuleType], None]]
"""Module name -> function that is called with the module when it is loaded, before the importer sees it."""


def _import_tensorflow(_: ModuleType) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("tensorflow")


TENSORFLOW_FIRST: Hooks = {"mpi4py": _import_tensorflow}
"""Loads TensorFlow before mpi4py.MPI, in whatever order the script imports them.

Open MPI and TensorFlow bring functions of hwloc with the same names, and a function is bound at its first call. If MPI
starts before TensorFlow is loaded, it ends with functions of TensorFlow's on data of its own, and crashes. (LD_BIND_NOW
would prevent that, too, but srun does not start with it.)"""


class _Finder:
    """Finder for sys.meta_path that wraps the loaders of some modules."""

    def __init__(self, hooks: Sequence[Hooks]) -> None:
        self._hooks = hooks

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that has hooks, with a loader that runs them; None for other modules."""
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
    """Call the hooks for modules that are imported from now on, in this order."""
    sys.meta_path.insert(0, _Finder(hooks))
