"""Runs a script or a module as Python itself does: in a `__main__` of its own, which stays there to the end.

`runpy.run_path` takes its module away when the script ends, and exit functions can no longer pickle what the
script has defined.
"""

import builtins
import io
import os
import pkgutil
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path


def run_script(script: str) -> None:
    """Run it, as `python script` does. Raises what the script raises."""
    path = str(Path(script).absolute())
    if pkgutil.get_importer(path) is not None:  # An archive with a __main__.py.
        sys.path[: 0 if is_path_safe() else 1] = [path]
        _fresh_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    main = _fresh_main()
    main.__dict__.update(
        __file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path)
    )
    exec(_code(path), main.__dict__)


def run_module(name: str) -> None:
    """Run it, as `python -m name` does. Raises what the module raises."""
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def is_path_safe() -> bool:
    """Whether the user wants no folder of the script in `sys.path`; the flag of this process is for its own modules."""
    return bool(os.environ.get("PYTHONSAFEPATH"))


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    return main


def _code(path: str) -> types.CodeType:
    with io.open_code(path) as file:
        compiled = pkgutil.read_code(file)  # Of a .pyc file.
    if compiled is not None:
        return compiled
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)
