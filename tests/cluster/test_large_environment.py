"""Environments larger than a command line can be reach ranks on other hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import RANK, SECONDS, user_environment
from namespaces import NamespaceHost

MANY = {f"TF_NUMBER_{n:05}": f"value {n}" for n in range(10_000)}
LONG = {"TF_LONG": "x" * 130_000}
CHECK = (
    RANK
    + """
many = sum(os.environ.get(f"TF_NUMBER_{n:05}") == f"value {n}" for n in range(10_000))
print(rank, many, len(os.environ.get("TF_LONG", "")), flush=True)
"""
)


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize("name", ["many", "long"])
def test_it_reaches_every_rank(
    hosts: dict[str, NamespaceHost], tmp_path: Path, controller: str, name: str
) -> None:
    (tmp_path / "train.py").write_text(CHECK)
    words = ["-H", "node1:1,node2:1", "--controller", controller, "--all-ranks", "train.py"]
    done = subprocess.run(
        hosts["node1"].argv([sys.executable, "-m", "hvdtrain.cli", "run", *words], tmp_path),
        env=user_environment(HOME=str(tmp_path), **(MANY if name == "many" else LONG)),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = "10000 0" if name == "many" else "0 130000"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} {numbers}" for rank in (0, 1)]


@pytest.mark.parametrize("name", ["MALLOC_CONF", "PYTHONPATH"])
def test_what_a_command_must_have_and_cannot_is_refused(
    hosts: dict[str, NamespaceHost], tmp_path: Path, name: str
) -> None:
    (tmp_path / "train.py").write_text(CHECK)
    words = ["-H", "node1:1,node2:1", "--controller", "gloo", "train.py"]
    environ = user_environment(HOME=str(tmp_path))
    environ[name] = environ.get(name, "") + ":/nowhere" * 12_000
    done = subprocess.run(
        hosts["node1"].argv([sys.executable, "-m", "hvdtrain.cli", "run", *words], tmp_path),
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 1
    assert f"shorten {name}, the longest (108" in done.stderr
    assert len(done.stderr.splitlines()) <= 3
