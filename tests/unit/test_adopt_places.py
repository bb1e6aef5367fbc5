"""Where a rank works instead of the user's folders: its working folder, that of the script, and paths to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.adopt.private_folder import PrivateFolder, private_folder
from hvdtrain.runtime import Rank, init

SECOND = Rank(1, 2, 1, 2)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    init()
    for name in ("project/src/train.py", "project/data/x", "other/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def written(folder: PrivateFolder, users: str) -> Path:
    """Return where this rank writes what it is told to write to a path of the user's."""
    path = Path(folder.own_path(users))
    path.touch()
    return path


@pytest.mark.parametrize("at", ["project", "project/src", "project/data", "other"])
def test_the_script_and_the_working_folder_are_the_ranks_own(
    project: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    users = project.parent / at
    monkeypatch.chdir(users)
    before = sorted(project.parent.rglob("*"))
    with private_folder(SECOND, project / "src" / "train.py") as folder:
        assert Path.cwd() == Path(os.environ["PWD"]) != users
        assert Path.cwd().name == users.name
        Path("new").touch()
        script = Path(folder.own_path(str(project / "src" / "train.py")))
        (script.parent / "beside").touch()
        assert script.is_file() and script.parent.name == "src"
        assert written(folder, str(users / "named")).parent == Path.cwd()
        assert sorted(project.parent.rglob("*")) == before
    assert Path.cwd() == users and Path(os.environ["PWD"]) != script.parent


def test_the_scripts_folder_comes_before_many_others(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        (project.parent / f"a{number}" / "b").mkdir(parents=True)
    monkeypatch.setattr("hvdtrain.adopt.private_folder.MOST_ENTRIES", 20)
    monkeypatch.chdir(project.parent)
    with private_folder(SECOND, project / "src" / "train.py"):
        assert Path("a0").is_symlink() != Path("a8").is_symlink()
        assert not Path("project/src").is_symlink() and Path("project/src/train.py").is_file()


@pytest.mark.parametrize("text", ["{0}", "{0}/x", "--out={0}", "--out={0}/x"])
def test_arguments_name_the_ranks_folder(project: Path, text: str) -> None:
    folder = PrivateFolder({project: Path("/own")})
    assert folder.own_path(text.format(project)) == text.format("/own")


def test_a_link_to_the_working_folder_is_the_ranks_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = project.parent / "link"
    link.symlink_to(project)
    monkeypatch.setenv("PWD", str(link))
    with private_folder(SECOND, link / "src" / "train.py") as folder:
        assert folder.own_path(f"--out={link}/out") == f"--out={Path.cwd()}/out"
        assert Path(folder.own_path(str(link / "src" / "train.py"))).parent == Path.cwd() / "src"


@pytest.mark.parametrize("text", ["{0}ion", "x{0}/x", "host:{0}", "s3:/{0}/x", "5", ""])
def test_other_arguments_stay(project: Path, text: str) -> None:
    folder = PrivateFolder({project: Path("/own")})
    assert folder.own_path(text.format(project)) == text.format(project)
    assert folder.own_path(str(project.parent)) == str(project.parent)


def test_below_the_root_folder_every_path_is_the_ranks() -> None:
    root = PrivateFolder({Path("/"): Path("/own")})
    given = ["/", "/a/b", "--out=/a", "a/b", "s3://a/b", "", "1/2"]
    wanted = ["/own/", "/own/a/b", "--out=/own/a", "a/b", "s3://a/b", "", "1/2"]
    assert [root.own_path(text) for text in given] == wanted
