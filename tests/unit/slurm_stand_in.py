"""Programs that play Slurm's, for unit tests."""

from __future__ import annotations

from pathlib import Path


def play(slurm: Path, name: str, script: str) -> None:
    path = slurm / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
