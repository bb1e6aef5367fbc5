"""What `hvdtrain new` copies really trains, with the command that it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch import run_command


@pytest.mark.slow
def test_a_copied_folder_trains(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    new = [sys.executable, "-m", "hvdtrain.cli", "new", "mnist", str(folder)]
    printed = subprocess.run(new, capture_output=True, text=True, check=True).stdout
    assert printed.endswith(f"Train with: cd {folder} && hvdtrain run --config run.yaml\n")
    config = folder / "run.yaml"
    text = config.read_text()
    assert "arguments: []" in text
    config.write_text(text.replace("arguments: []", "arguments: [--epochs, 2]"))
    line = f"cd {folder} && {sys.executable} -m hvdtrain.cli run --config run.yaml"
    trained = run_command(["/bin/sh", "-c", line], env={"HVDTRAIN_VERBOSE": "1"})
    assert trained.returncode == 0, trained.output
    assert " -np 2 " in trained.output
    assert trained.output.count("validation accuracy") == 1
    assert len(list((folder / ".hvdtrain/logs").iterdir())) == 1
