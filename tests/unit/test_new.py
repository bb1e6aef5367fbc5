"""`hvdtrain new`: what it copies, from a clone, from a wheel and from a source archive."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from hvdtrain.cli.command_table import main
from hvdtrain.cli.run import run
from hvdtrain.starters import CONFIG, STARTERS, contents

ROOT = Path(__file__).parents[2]
SOURCES = {
    "mnist": "train_mnist.py",
    "tabular": "train_tabular.py",
    "large-batch": "train_large_batch.py",
    "custom-loop": "train_custom_loop.py",
    "horovod-style": "horovod_style.py",
    "tpu": "train_tpu.py",
    "parameter-server": "train_parameter_server.py",
    "model-parallel": "train_model_parallel.py",
}
LAUNCHES: dict[str, dict[str, object]] = {
    "tpu": {"strategy": "tpu"},
    "parameter-server": {"strategy": "parameter-server", "workers": 2, "ps": 2},
}


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["new", *map(str, args)], prog_name="hvdtrain")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_training_script_can_be_copied() -> None:
    assert sorted(SOURCES.values()) == sorted(path.name for path in (ROOT / "scripts").glob("*.py"))
    assert list(STARTERS) == list(SOURCES)


@pytest.mark.parametrize("source", SOURCES.values())
def test_every_option_of_a_script_is_described(source: str) -> None:
    tree = ast.parse((ROOT / "scripts" / source).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    options = [call for call in calls if ast.unparse(call.func) == "parser.add_argument"]
    for option in options:
        texts = [ast.literal_eval(word.value) for word in option.keywords if word.arg == "help"]
        assert texts and not texts[0].startswith("["), ast.unparse(option)
    assert options


@pytest.mark.parametrize("name", SOURCES)
def test_the_copy_is_the_script_with_a_configuration(name: str, here: Path) -> None:
    result = call(name)
    assert result.exit_code == 0, result.output
    original = (ROOT / "scripts" / SOURCES[name]).read_text()
    copied = (here / f"{name}.py").read_text()
    assert copied == original.replace(f"scripts/{SOURCES[name]}", f"{name}.py")
    # What it says of itself can be typed where the copy is.
    assert f" {name}.py" in copied and "scripts/" not in copied
    assert not (here / f"{name}.py").is_symlink()
    settings = yaml.safe_load((here / CONFIG).read_text())
    assert settings == {
        "script": f"{name}.py",
        "arguments": ["--pipeline", 2] if name == "model-parallel" else [],
        **LAUNCHES.get(name, {"np": 2}),
    }
    assert result.stdout.splitlines()[-1] == "Train with: hvdtrain run --config run.yaml"


def test_run_takes_the_configuration() -> None:
    """What stands behind # too: each key there is an option of `hvdtrain run`."""
    assert call("mnist").exit_code == 0
    dry = CliRunner().invoke(main, ["run", "--config", CONFIG, "--dry-run"], prog_name="hvdtrain")
    assert dry.exit_code == 0, dry.output
    assert " -np 2 " in dry.stdout
    assert dry.stdout.endswith(" mnist.py\n")
    lines = (line.removeprefix("# ") for line in Path(CONFIG).read_text().splitlines())
    keys = {
        line.partition(":")[0] for line in lines if ": " in line and " " not in line.split(":")[0]
    }
    assert keys == {"script", "arguments", "np", "hosts", "network-interfaces", "log-dir"}
    known = {name.lstrip("-") for parameter in run.params for name in parameter.opts}
    assert keys <= known


def test_without_a_name_the_scripts_are_listed(here: Path) -> None:
    result = call()
    assert result.exit_code == 0
    for starter in STARTERS.values():
        assert f"{starter.name} " in result.stdout
        assert starter.shows in result.stdout
    assert not list(here.iterdir())


def test_a_folder_is_made_and_named_in_the_next_command(here: Path) -> None:
    result = call("tabular", "my runs/first")
    assert result.exit_code == 0
    assert {path.name for path in (here / "my runs/first").iterdir()} == {"tabular.py", CONFIG}
    assert "Train with: cd 'my runs/first' && hvdtrain run" in result.stdout


def test_nothing_is_overwritten_without_force(here: Path) -> None:
    (here / CONFIG).write_text("mine")
    result = call("mnist")
    assert result.exit_code == 2
    assert "run.yaml is there already" in result.stderr
    assert "--force" in result.stderr
    assert (here / CONFIG).read_text() == "mine"
    assert not (here / "mnist.py").exists()
    assert call("mnist", "--force").exit_code == 0
    assert (here / CONFIG).read_text() != "mine"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["mnits"],
            "No script 'mnits': choose from mnist, tabular, large-batch, custom-loop, horovod-style, tpu, "
            "parameter-server, "
            "model-parallel. Did",
        ),
        (["mnist", "file"], "is a file"),
        (["mnist", "file/below"], "cannot write to file/below"),
    ],
)
def test_wrong_usage(args: list[str], message: str, here: Path) -> None:
    (here / "file").touch()
    result = call(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def python(*args: str | Path, cwd: Path, path: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_sources(folder: Path) -> Path:
    """What git knows: a build leaves files in the sources, and must not in ours."""
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.cfg", "scripts", "hvdtrain"):
        for path in [ROOT / name, *(ROOT / name).rglob("*")]:
            if path.is_dir() or path.suffix == ".pyc":
                continue
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                target.symlink_to(os.readlink(path))  # noqa: PTH115 - as it is written
            else:
                target.write_bytes(path.read_bytes())
    return folder


def build(kind: str, sources: Path, folder: Path) -> Path:
    """Build with the project's backend, without a network."""
    folder.mkdir()
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    python("-c", code, folder, cwd=sources, path=sources)
    (built,) = folder.iterdir()
    return built


def test_wheel_and_source_archive_have_the_scripts(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    archive = build("sdist", copy_of_sources(tmp_path / "clone"), tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        # Python 3.11.3 and older have no filters; 3.14 takes this one by itself.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(tmp_path / "unpacked")
    (sources,) = (tmp_path / "unpacked").iterdir()
    assert not [path for path in sources.rglob("*") if path.is_symlink()]
    wheel = build("wheel", sources, tmp_path / "wheel")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(installed)
    for name in STARTERS:
        folder = tmp_path / "new" / name
        python("-m", "hvdtrain.cli", "new", name, folder, cwd=tmp_path, path=installed)
        assert {path.name: path.read_text() for path in folder.iterdir()} == contents(
            STARTERS[name]
        )


def test_a_wheel_from_a_clone_has_the_scripts(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    wheel = build("wheel", copy_of_sources(tmp_path / "clone"), tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as file:
        for name, source in SOURCES.items():
            text = file.read(f"hvdtrain/starters/scripts/{name}.py").decode()
            assert text == (ROOT / "scripts" / source).read_text()
        assert "hvdtrain/starters/run.yaml" in file.namelist()
