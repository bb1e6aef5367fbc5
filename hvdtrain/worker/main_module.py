"""Run a script or a module as Python itself does: as the module `__main__`, which remains until the process ends.

`runpy.run_path` removes its module when the script ends, after which exit functions can no longer pickle what the
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

from hvdtrain.errors import UsageError


def run_script(script: str) -> None:
    """Run `script` like `python script`. Raises what the script raises."""
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
    """Run the module `name` like `python -m name`. Raises what the module raises."""
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def is_path_safe() -> bool:
    """Return whether the user has set PYTHONSAFEPATH; this process's own -P flag is for hvdtrain's modules only."""
    return bool(os.environ.get("PYTHONSAFEPATH"))


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    return main


def _code(path: str) -> types.CodeType:
    with io.open_code(path) as file:
        compiled = pkgutil.read_code(file)  # None unless it is a .pyc file.
    if compiled is not None:
        return compiled
    with io.open_code(path) as file:
        source = file.read()
    if b"\0" in source:  # Python's own error does not name the file.
        raise UsageError(f"{path} is not a Python script: it contains NUL bytes")
    return compile(source, path, "exec", dont_inherit=True)
