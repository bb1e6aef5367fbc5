"""Find Docker or podman, and query whether it is running and what it supports."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.container.container_command import CPU_IMAGE, GPU_IMAGE, EngineName
from hvdtrain.launch.running.timed_command import ANSWER_SECONDS, ask

CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""Folders with CDI (Container Device Interface) specifications."""
GPU_FIX = {
    "docker": "install nvidia-container-toolkit; sudo nvidia-ctk runtime configure; sudo systemctl restart docker",
    "podman": "install nvidia-container-toolkit; sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
}
_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
_DOCKERFILES = {CPU_IMAGE: "docker/Dockerfile.cpu", GPU_IMAGE: "docker/Dockerfile.gpu"}


@dataclass(frozen=True)
class ContainerEngine:
    """A container engine that responds.

    Attributes:
        name: `docker` or `podman`.
        rootless: Whether it runs as an ordinary user.
        has_gpus: Whether it can give a container access to GPUs.
        version: Version of the engine.
    """

    name: EngineName
    rootless: bool
    has_gpus: bool
    version: str = ""


class Refused(Exception):
    """The engine refused the request. The message is the engine's own."""


def find_container_engine(wanted: str) -> ContainerEngine:
    """Return the engine `wanted`, or for `auto` the first that responds. Raises HvdtrainError if none does."""
    problems = []
    for name in get_args(EngineName):
        if wanted not in ("auto", name):
            continue
        if not shutil.which(name):
            problems.append(f"{name} is not installed")
            continue
        try:
            return ask_engine(name, os.environ)
        except Refused as error:
            problems.append(f"{name} does not answer: {error}")
    raise HvdtrainError(
        "no container engine can be used here:\n  "
        + "\n  ".join(problems)
        + "\nInstall Docker or podman, start Docker's daemon, or add yourself to the group docker; "
        "`hvdtrain run` needs no container engine."
    )


def ask_engine(
    name: EngineName,
    environ: Mapping[str, str],
    *,
    limit: float = ANSWER_SECONDS,
    cdi_folders: Sequence[Path] = CDI_FOLDERS,
) -> ContainerEngine:
    """Query the engine for its properties. Raises Refused if it does not work for this user."""
    try:
        info: dict[str, Any] = json.loads(
            _answer(name, "info", "--format", "{{json .}}", environ=environ, limit=limit)
        )
    except ValueError as error:
        raise Refused("its output is not JSON") from error
    cdi = any(b"nvidia.com/gpu" in _content(f) for d in cdi_folders for f in d.glob("*"))
    if name == "podman":
        rootless = info.get("host", {}).get("security", {}).get("rootless")
        return ContainerEngine(
            name, bool(rootless), cdi, info.get("version", {}).get("Version", "")
        )
    # Docker's client responds even if its daemon is not running.
    if info.get("ServerErrors"):
        raise Refused(str(info["ServerErrors"][0]))
    rootless = any("name=rootless" in option for option in info.get("SecurityOptions") or ())
    hook = any(shutil.which(one, path=environ.get("PATH")) for one in _HOOKS)
    gpus = cdi or hook or "nvidia" in (info.get("Runtimes") or {})
    return ContainerEngine(name, rootless, gpus, info.get("ServerVersion", ""))


def check_gpus(engine: ContainerEngine) -> None:
    """Check that the engine can give a container access to GPUs. Raises HvdtrainError if not."""
    if not engine.has_gpus:
        raise HvdtrainError(
            f"{engine.name} cannot give GPUs to a container: {GPU_FIX[engine.name]}; or use --gpus none"
        )


def check_image(engine: ContainerEngine, image: str) -> None:
    """Check that `image` exists, if it is one of hvdtrain's own, which the user builds. Raises HvdtrainError if not."""
    if image not in _DOCKERFILES:
        return
    try:
        _answer(engine.name, "image", "inspect", "--format", "{{.Id}}", image)
    except Refused:
        podman = "--format docker " if engine.name == "podman" else ""
        raise HvdtrainError(
            f"image {image} was not found. Build it once, in hvdtrain's source folder:\n"
            f"  {engine.name} build {podman}--file {_DOCKERFILES[image]} --tag {image} .\n"
            "or choose another with --image"
        ) from None


def _answer(
    *argv: str, environ: Mapping[str, str] | None = None, limit: float = ANSWER_SECONDS
) -> str:
    said = ask(argv, environ=environ, limit=limit)
    if said.returncode != 0:
        raise Refused(said.last_line)
    return said.stdout


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
