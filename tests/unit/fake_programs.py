"""Stand-ins for programs of the machine: small shell scripts in a folder that is all of PATH."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def path_with(folder: Path, programs: Mapping[str, str]) -> dict[str, str]:
    """An environment whose PATH has these programs only: name -> lines of /bin/sh."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)
    return {"PATH": str(folder)}
