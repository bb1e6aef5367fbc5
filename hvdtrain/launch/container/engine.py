"""Docker or podman: which one is here and answers, and what it has."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.container.command import CPU_IMAGE, GPU_IMAGE, EngineName

SECONDS = 20
_CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
_DOCKERFILES = {CPU_IMAGE: "docker/Dockerfile.cpu", GPU_IMAGE: "docker/Dockerfile.gpu"}


@dataclass(frozen=True)
class ContainerEngine:
    """An engine that answered.

    Attributes:
        rootless: whether it runs as an ordinary user.
        has_gpus: whether it can give GPUs to a container.
    """

    name: EngineName
    rootless: bool
    has_gpus: bool


def find_container_engine(wanted: str) -> ContainerEngine:
    """The engine `wanted`, or of `auto` the first that answers. Raises HvdtrainError if none does."""
    problems = []
    for name in get_args(EngineName):
        if wanted not in ("auto", name):
            continue
        if not shutil.which(name):
            problems.append(f"{name} is not installed")
            continue
        try:
            return read_info(name, _ask(name, "info", "--format", "{{json .}}"))
        except _Refused as error:
            problems.append(f"{name} does not answer: {error}")
    raise HvdtrainError(
        "no container engine can be used here:\n  "
        + "\n  ".join(problems)
        + "\nInstall Docker or podman, start Docker's daemon, or join the group docker; `hvdtrain run` needs neither."
    )


def read_info(name: EngineName, text: str) -> ContainerEngine:
    """The engine that says `text` about itself (JSON of its command `info`)."""
    try:
        info: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise _Refused("its answer is no JSON") from error
    cdi = any(b"nvidia.com/gpu" in _content(f) for d in _CDI_FOLDERS for f in d.glob("*"))
    if name == "podman":
        security = info.get("host", {}).get("security", {})
        return ContainerEngine(name, bool(security.get("rootless")), cdi)
    if info.get("ServerErrors"):
        raise _Refused(str(info["ServerErrors"][0]))
    rootless = any("name=rootless" in option for option in info.get("SecurityOptions") or ())
    runtimes = info.get("Runtimes") or {}
    return ContainerEngine(
        name, rootless, "nvidia" in runtimes or cdi or any(map(shutil.which, _HOOKS))
    )


def check_gpus(engine: ContainerEngine) -> None:
    """Raises HvdtrainError if the engine cannot give GPUs to a container."""
    if engine.has_gpus:
        return
    then = (
        "nvidia-ctk runtime configure --runtime=docker, and restart Docker"
        if engine.name == "docker"
        else "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
    )
    raise HvdtrainError(
        f"{engine.name} cannot give GPUs to a container: install NVIDIA's container toolkit and run "
        f"{then}; or use --gpus none"
    )


def check_image(engine: ContainerEngine, image: str) -> None:
    """Raises HvdtrainError if it is one of our own images, which are built and not pulled, and is not here."""
    if image not in _DOCKERFILES:
        return
    try:
        _ask(engine.name, "image", "inspect", "--format", "{{.Id}}", image)
    except _Refused:
        podman = "--format docker " if engine.name == "podman" else ""
        raise HvdtrainError(
            f"there is no image {image} here. Build it, once, in hvdtrain's source folder:\n"
            f"  {engine.name} build {podman}--file {_DOCKERFILES[image]} --tag {image} .\n"
            "or name another with --image"
        ) from None


class _Refused(Exception):
    """The engine's own words."""


def _ask(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Refused(str(error)) from error
    if done.returncode != 0:
        raise _Refused((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    return done.stdout


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
