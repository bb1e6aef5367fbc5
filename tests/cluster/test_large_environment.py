"""Environments larger than a command line can be reach ranks on other hosts."""

from __future__ import annotations

import json
import os
import random
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
    assert f"shorten the longest, {name} (108" in done.stderr
    assert len(done.stderr.splitlines()) <= 3


SHOW = (
    RANK
    + """
import json
seen = {name: value for name, value in os.environ.items() if name.startswith(("TF_F", "FREE", "HOROVOD_F", "MALLOC_F"))}
with open(f"seen.{rank}", "w", encoding="ascii") as file:
    json.dump(seen, file)
"""
)
HOSTILE = "'\"\\$`;&|<>(){}[]*?!#~=%-, \t\n\r\x0b\x1b\x7f\u00e9\u2028\U0001f600\udcff\udc80aZ09"


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_any_value_reaches_every_rank(
    hosts: dict[str, NamespaceHost], tmp_path: Path, controller: str
) -> None:
    """Whichever way it goes: asked for by name or with its value, or as one of those that travel anyway."""
    draw = random.Random(os.urandom(8).hex())
    values = [
        *HOSTILE,
        *("", " ", "-", "--", "a=b", "$(touch x)", "`touch x`", "%s", "\\", "\\n", "*", "~"),
        *("".join(draw.choices(HOSTILE, k=draw.randrange(1, 40))) for _ in range(100)),
    ]
    # The latter stand in a command over Gloo.
    kinds = ("TF_F", "HOROVOD_F", "MALLOC_F")
    travelling = {f"{kind}{n}": value for kind in kinds for n, value in enumerate(values)}
    by_name = {f"FREE_N{n}": value for n, value in enumerate(values)}
    by_value = {f"FREE_V{n}": value for n, value in enumerate(values)}
    (tmp_path / "train.py").write_text(SHOW)
    asked = [word for name in by_name for word in ("--env", name)]
    asked += [word for pair in by_value.items() for word in ("--env", "=".join(pair))]
    words = ["-H", "node1:1,node2:1", "--controller", controller, *asked, "train.py"]
    done = subprocess.run(
        hosts["node1"].argv([sys.executable, "-m", "hvdtrain.cli", "run", *words], tmp_path),
        env=user_environment(HOME=str(tmp_path), **travelling, **by_name),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"seen.{rank}").read_text())
        wrong = {
            name: (value, seen.get(name))
            for name, value in {**travelling, **by_name, **by_value}.items()
            if seen.get(name) != value
        }
        assert wrong == {}, rank
    assert not (tmp_path / "x").exists()
