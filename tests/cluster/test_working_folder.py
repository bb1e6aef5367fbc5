"""What lies in the working folder is for the user's script alone: the launch's own programs do not import it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import SECONDS, user_environment
from namespaces import NamespaceHost

Hosts = dict[str, NamespaceHost]
# Modules of Python that the programs of a launch, Horovod's launcher and multiprocessing import.
NAMES = ("logging", "queue", "signal", "json", "socket", "selectors", "codecs", "pickle", "http")
NAMES += ("multiprocessing", "psutil", "cloudpickle", "yaml", "hvdtrain", "horovod", "random")
TRAP = "import os\nwith open({path!r}, 'a') as file:\n    file.write({name!r} + chr(10))\nraise SystemExit(9)\n"

SCRIPT = """
import json, os, sys
rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
import mine
with open(f"seen.{rank}", "w") as file:
    json.dump([sys.path, sys.argv, mine.__file__], file)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Full of traps; the script lies in a folder of its own."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(TRAP.format(path=str(tmp_path / "ran"), name=name))
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(SCRIPT)
    (scripts / "mine.py").touch()
    return tmp_path


def check(done: subprocess.CompletedProcess[str], folder: Path, ranks: int) -> None:
    ran = folder / "ran"
    assert not ran.exists(), ran.read_text()
    assert done.returncode == 0, done.stderr
    plain = [sys.executable, "-c", "import sys, json; print(json.dumps(sys.path[1:]))"]
    environ = user_environment()
    usual = json.loads(subprocess.run(plain, env=environ, capture_output=True, check=True).stdout)
    scripts = str(folder / "scripts")
    for rank in range(ranks):
        path, argv, mine = json.loads((folder / f"seen.{rank}").read_text())
        assert path == [scripts, *usual], "as with `python scripts/train.py`"
        assert (argv, mine) == (["scripts/train.py", "-x"], f"{scripts}/mine.py")


def command(*options: str) -> list[str]:
    program = Path(sys.executable).parent / "hvdtrain"
    return [str(program), "run", *options, "scripts/train.py", "-x"]


def test_on_this_machine(folder: Path, controller: str) -> None:
    done = subprocess.run(
        command("-np", "2", "--controller", controller),
        cwd=folder,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    check(done, folder, 2)


@pytest.mark.parametrize("elastic", [False, True])
def test_over_ssh(folder: Path, hosts: Hosts, controller: str, elastic: bool) -> None:
    if elastic and controller == "mpi":
        return
    options = ["--min-np", "2", "-np", "2"] if elastic else []
    done = subprocess.run(
        hosts["node1"].argv(
            command("-H", "node1:1,node2:1", "--controller", controller, *options), folder
        ),
        env={**user_environment(), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    check(done, folder, 2)


def test_with_parameter_servers(folder: Path) -> None:
    (folder / "scripts/train.py").write_text(SCRIPT.replace("rank = ", "rank = 0 #"))
    done = subprocess.run(
        command("--strategy", "parameter-server", "--workers", "1", "--ps", "1"),
        cwd=folder,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    check(done, folder, 1)


@pytest.mark.parametrize(
    "words",
    [("doctor", "--help"), ("doctor", "--json"), ("version",), ("install-horovod", "--dry-run")],
)
def test_other_commands(folder: Path, words: tuple[str, ...]) -> None:
    program = Path(sys.executable).parent / "hvdtrain"
    subprocess.run(
        [str(program), *words],
        cwd=folder,
        env={**os.environ, **user_environment()},
        capture_output=True,
        timeout=SECONDS,
    )
    ran = folder / "ran"
    assert not ran.exists(), ran.read_text()
