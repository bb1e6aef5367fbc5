"""What a launch on this machine shows of secrets, in the process list and on its own output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from jobs import RANK, SECONDS, user_environment

# Looks at the process list from inside the job.
LOOK = (
    RANK
    + """
from pathlib import Path
for entry in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        line = entry.read_bytes()
    except OSError:
        continue
    if any(os.environ[name].encode() in line for name in ("WANTED", "TF_WANTED", "API_KEY")):
        sys.exit(f"shown: {line}")
assert sys.argv[1:] == ["--password", "hunter2"]
"""
)


def test_no_value_is_shown(tmp_path: Path, controller: str) -> None:
    (tmp_path / "train.py").write_text(LOOK)
    words = ["-np", "2", "--controller", controller, "--verbose", "--env", "WANTED"]
    words += ["--env", "TF_WANTED", "--env", "API_KEY=key-of-ours", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.cli", "run", *words, "--password", "hunter2"],
        cwd=tmp_path,
        env=user_environment(WANTED="wanted-value", TF_WANTED="another-value"),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    logs = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    said = done.stdout + done.stderr + logs
    assert "--password '***'" in said or "--password ***" in said
    for value in ("hunter2", "wanted-value", "another-value", "key-of-ours"):
        assert value not in said


def test_a_secret_for_mpirun_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["-np", "2", "--mpi-args=-x API_KEY=hush", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.cli", "run", *words],
        cwd=tmp_path,
        env={**os.environ, **user_environment()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "use --env API_KEY instead" in done.stderr
    assert "hush" not in done.stderr + done.stdout
