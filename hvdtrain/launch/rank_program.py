"""Determine what each rank runs from the words after the options: a Python script, a module, or any
other program.

    train.py --epochs 5            a script
    python -u train.py             a script, with the given interpreter and its options
    python -m package.module       a module
    bash job.sh, ./train           a program
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hvdtrain.adopt_options import AdoptOptions
from hvdtrain.errors import UsageError

Kind = Literal["script", "module", "program", "adopted"]
# Arguments of `python -m hvdtrain.worker` before the name.
_WORKERS_WORDS: dict[Kind, tuple[str, ...]] = {
    "script": (),
    "module": ("-m",),
    "program": ("--program",),
    "adopted": ("-m", "hvdtrain.adopt"),
}
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_MODULE = re.compile(r"\w+(\.\w+)*")
_OPTIONS_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}


@dataclass(frozen=True)
class Program:
    """The program that each rank runs.

    Attributes:
        name: Path of the script, name of the module, or the program.
        arguments: Arguments of the program.
        kind: "script", "module", "program" or "adopted": a script that `hvdtrain.adopt` runs.
        python: Python interpreter of the ranks.
        python_options: Options of the interpreter, such as -u.
        adopt_options: Options of `hvdtrain.adopt`.
    """

    name: Path
    arguments: tuple[str, ...] = ()
    kind: Kind = "script"
    python: str = sys.executable
    python_options: tuple[str, ...] = ()
    adopt_options: AdoptOptions = field(default_factory=AdoptOptions)

    @property
    def is_script(self) -> bool:
        """Whether the name is the path of a Python script."""
        return self.kind in {"script", "adopted"}


def rank_command(program: Program) -> list[str]:
    """Return the command of a rank, which runs the program under `hvdtrain.worker`."""
    return [
        *(program.python, *program.python_options, "-P", "-m", "hvdtrain.worker"),
        *(*_WORKERS_WORDS[program.kind], *program.adopt_options.words()),
        *(str(program.name), *program.arguments),
    ]


# Option -> attribute of AdoptOptions.
_OF_ADOPT = {
    "adopt_batch": "batch",
    "adopt_learning_rate": "learning_rate",
    "adopt_explain": "explain",
}
PROGRAM_OPTIONS = ("script", "arguments", "module", "adopt", *_OF_ADOPT)
"""Options of `hvdtrain run` that say what each rank runs."""


def program_given(values: Mapping[str, Any]) -> Program:
    """Return the Program that the values of PROGRAM_OPTIONS name; None or nothing is the default.

    Raises:
        UsageError: As `program_of`; or an option of --adopt is given without it.
    """
    given = [name for name in _OF_ADOPT if values.get(name)]
    if given and not values.get("adopt"):
        raise UsageError(f"--{given[0].replace('_', '-')} has no effect here: add --adopt")
    adopt = AdoptOptions(**{_OF_ADOPT[name]: values[name] for name in given})
    return program_of(
        values["script"],
        values.get("arguments") or (),
        module=bool(values.get("module")),
        adopt=adopt if values.get("adopt") else None,
    )


def program_of(
    name: Path,
    arguments: Sequence[str],
    *,
    module: bool = False,
    adopt: AdoptOptions | None = None,
) -> Program:
    """Parse the words of a command line, where `module` stands for -m and `adopt` for --adopt, into a Program.

    Raises:
        UsageError: The script or module is missing or invalid, the program cannot be executed, or is no script to
            adopt.
    """
    if adopt is not None:
        program = program_of(name, arguments, module=module)
        if program.kind != "script":
            raise UsageError(f"--adopt needs a Python script, but {name} is a {program.kind}")
        return replace(program, kind="adopted", adopt_options=adopt)
    if module:
        return _module(str(name), arguments, Program(name))
    if _PYTHON.fullmatch(name.name):
        return _by_python(name, list(arguments))
    kind: Kind = "program" if _is_program(name) else "script"
    return Program(name, tuple(arguments), kind)


def _by_python(python: Path, words: list[str]) -> Program:
    """Return the Program for `python WORDS...`."""
    found = shutil.which(python)
    if found is None:
        raise UsageError(
            f"there is no {python} in PATH: activate its environment, or leave {python} out to use {sys.executable}"
        )
    # hvdtrain's own interpreter, even if its environment is reached through a link.
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
    """Return whether `name` is not a Python script. Raises UsageError if it is not executable either."""
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
    """Return the first line, or nothing if the file cannot be read; that is reported when it runs."""
    try:
        with path.open("rb") as file:
            return file.readline(256)
    except OSError:
        return b""
