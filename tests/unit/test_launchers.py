"""The launchers: those of hvdtrain, and one that another distribution brings."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers import LAUNCHERS, find_launcher, launcher_names

REPOSITORY = Path(__file__).parents[2]
GUIDE = REPOSITORY / "docs" / "adding-a-launcher.md"
SCRIPT = """
import os
from hvdtrain.rank_variables import rank_of, size_of
names = ("HOROVOD_FUSION_THRESHOLD", "A", "B", "UNASKED")
print("rank", rank_of(os.environ), "of", size_of(os.environ), *map(os.environ.get, names), flush=True)
"""


def distribution(folder: Path, name: str, refers_to: str, code: str) -> None:
    """Install `code` as a module of a distribution with this entry point."""
    folder.mkdir(exist_ok=True)
    (folder / f"{refers_to.partition(':')[0]}.py").write_text(code)
    info = folder / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[hvdtrain.launchers]\n{name} = {refers_to}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is searched for distributions."""
    folder = tmp_path / "site"
    monkeypatch.syspath_prepend(str(folder))
    return folder


def example() -> str:
    """The launcher of the guide."""
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def hvdtrain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "B": "here", "UNASKED": "x"}
    environment["PYTHONPATH"] = f"{folder / 'site'}{os.pathsep}{REPOSITORY}"
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain.cli", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_launcher_of_another_distribution_runs_ranks(tmp_path: Path) -> None:
    distribution(tmp_path / "site", "plain-mpirun", "plain_mpirun:prepare", example())
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--launcher", "plain-mpirun", "-np", "2", "--fusion-threshold-mb", "1"]
    options += ["--env", "A=b c", "--env", "B"]
    ran = hvdtrain(tmp_path, "run", *options, "--all-ranks", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == [
        f"[{rank}] rank {rank} of 2 {2**20} b c here None" for rank in (0, 1)
    ]
    shown = hvdtrain(tmp_path, "run", *options, "--dry-run", "train.py").stdout
    words = shlex.split(shown)
    assert words[:3] == ["env", "A=b c", "HVDTRAIN_FORWARD=A,B"]
    assert words[words.index("mpirun") :][:2] == ["mpirun", "--allow-run-as-root"]
    assert "[auto|horovodrun|srun|plain-mpirun]" in hvdtrain(tmp_path, "run", "--help").stdout

    # What it cannot do, and what only horovodrun has.
    refused = hvdtrain(tmp_path, "run", *options, "--controller", "gloo", "train.py")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--launcher plain-mpirun: use --controller mpi, without hosts" in refused.stderr
    refused = hvdtrain(tmp_path, "run", *options, "--ssh-port", "2", "train.py")
    assert "--ssh-port has no effect here: another launcher starts the workers" in refused.stderr
    misspelt = hvdtrain(tmp_path, "run", "--launcher", "plain-mpi", "-np", "2", "train.py")
    assert "'plain-mpi' is not one of 'auto', 'horovodrun'" in misspelt.stderr


def test_verbose_shows_what_dry_run_prints(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--verbose", "-np", "1", "--gloo", "--env", "A=b c"]
    printed = hvdtrain(tmp_path, "run", *options, "--dry-run", "train.py").stdout
    ran = hvdtrain(tmp_path, "run", *options, "train.py")
    assert ran.returncode == 0, ran.stderr
    assert printed in ran.stderr
    assert re.match(r"env 'A=b c' \S*horovodrun -np 1 --gloo --verbose ", printed)


def test_what_is_brought_is_loaded_when_it_is_asked_for(site: Path) -> None:
    distribution(site, "broken", "broken_launcher:prepare", "import no_such_module\n")
    distribution(site, "none", "launcher_without:prepare", "prepare = None\n")
    assert launcher_names() == [*LAUNCHERS, "broken", "none"]
    for name, message in (
        ("broken", r"broken_launcher:prepare cannot be loaded \(ModuleNotFoundError: .*\): repair broken,"),
        ("none", r"launcher_without:prepare is not a function prepare\(plan, site\): repair none,"),
        ("brokn", r"no such launcher. Did you mean 'broken'\?"),
        ("xyz", r"no such launcher. Choose from horovodrun, srun, broken, none"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=f"^--launcher {name}: {message}"):
            find_launcher(name)


def test_hvdtrains_own_cannot_be_replaced(site: Path) -> None:
    distribution(site, "srun", "other_srun:prepare", "def prepare(plan, site): ...\n")
    assert launcher_names() == list(LAUNCHERS)
    assert find_launcher("srun").__module__ == LAUNCHERS["srun"]
