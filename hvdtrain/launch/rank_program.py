"""What each rank runs, from the arguments after the options: a Python script, a module, or any other
program.

    train.py --epochs 5            a script
    python -u train.py             the same, by the interpreter and with the options that are named
    python -m package.module       a module
    bash job.sh, ./train           a program
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.errors import UsageError

Kind = Literal["script", "module", "program"]
# What `python -m hvdtrain.worker` takes in front of the name.
_WORKERS_WORDS: dict[Kind, tuple[str, ...]] = {
    "script": (),
    "module": ("-m",),
    "program": ("--program",),
}
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_MODULE = re.compile(r"\w+(\.\w+)*")
_OPTIONS_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}


@dataclass(frozen=True)
class Program:
    """What each rank runs.

    Attributes:
        name: the script's path, the module's name, or the program.
        arguments: its own.
        kind: which of them it is.
        python: the interpreter of the ranks.
        python_options: of the interpreter, such as -u.
    """

    name: Path
    arguments: tuple[str, ...] = ()
    kind: Kind = "script"
    python: str = sys.executable
    python_options: tuple[str, ...] = ()


def rank_command(program: Program) -> list[str]:
    """What a rank runs: the program, under `hvdtrain.worker`."""
    return [
        *(program.python, *program.python_options, "-P", "-m", "hvdtrain.worker"),
        *(*_WORKERS_WORDS[program.kind], str(program.name), *program.arguments),
    ]


def program_of(name: Path, arguments: Sequence[str], *, module: bool = False) -> Program:
    """The program that these words describe. Raises UsageError if there is nothing to run.

    Args:
        name: the first word.
        arguments: those behind it.
        module: whether the name was said to be a module's (`-m`).
    """
    if module:
        return _module(str(name), arguments, Program(name))
    if _PYTHON.fullmatch(name.name):
        return _by_python(name, list(arguments))
    kind: Kind = "program" if _is_program(name) else "script"
    return Program(name, tuple(arguments), kind)


def _by_python(python: Path, words: list[str]) -> Program:
    """What `python WORDS...` runs."""
    found = shutil.which(python)
    if found is None:
        raise UsageError(f"there is no {python} in PATH")
    # The one that hvdtrain runs in, also where its environment is linked to.
    own = Path(found).parent.samefile(Path(sys.executable).parent)
    by = Program(Path(), python=sys.executable if own else found)
    options: list[str] = []
    while words and words[0].startswith("-") and len(words[0]) > 1:
        word = words.pop(0)
        if word == "-m":
            if not words:
                raise UsageError(f"{python} -m: the name of the module is missing")
            return _module(words[0], words[1:], by, tuple(options))
        if word.startswith("-c"):
            return Program(python, (*options, word, *words), "program")
        options += [word, *(words[:1] if word in _OPTIONS_WITH_VALUE else [])]
        words = words[1:] if word in _OPTIONS_WITH_VALUE else words
    if not words:
        raise UsageError(
            f"{python}: the script is missing, as in hvdtrain run -np 4 {python} train.py"
        )
    return Program(Path(words[0]), tuple(words[1:]), "script", by.python, tuple(options))


def _module(
    name: str, arguments: Sequence[str], by: Program, options: tuple[str, ...] = ()
) -> Program:
    if not _MODULE.fullmatch(name):
        raise UsageError(f"-m {name}: expected the name of a module, such as package.module")
    return Program(Path(name), tuple(arguments), "module", by.python, options)


def _is_program(name: Path) -> bool:
    """Whether it is not a Python script. Raises UsageError if it is not executable either."""
    if name.suffix == ".py":
        return False
    if not name.is_file():
        return len(name.parts) == 1 and name.name != ".." and shutil.which(name) is not None
    first = _first_line(name)
    if first.startswith(b"#!") and b"python" not in first and not os.access(name, os.X_OK):
        raise UsageError(
            f"{name} is neither a Python script nor executable: chmod +x {name}, or name the "
            f"program that runs it, such as: bash {name}"
        )
    return first.startswith((b"#!", b"\x7fELF")) and b"python" not in first


def _first_line(path: Path) -> bytes:
    """Empty if it cannot be read, which is reported when it is run."""
    try:
        with path.open("rb") as file:
            return file.readline(256)
    except OSError:
        return b""
