"""Build the `docker run` or `podman run` command for a launch in a container. Pure functions.

The container runs `hvdtrain run` on this machine's GPUs. In a job with several hosts, each of the
others runs a container with only an ssh server (`docker_argv` with the command `sshd`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.errors import UsageError
from hvdtrain.launch.env_forwarding import into_container, is_name, require_values
from hvdtrain.launch.plan_validation import check_image

EngineName = Literal["docker", "podman"]
CPU_IMAGE = "hvdtrain:cpu"
GPU_IMAGE = "hvdtrain:gpu"
SSH_PORT = 2222
SSH_KEYS = "/run/hvdtrain/ssh"
"""Folder in the images where a job's ssh keys are mounted."""
SSHD = ("sshd",)
"""Command of the images that runs an ssh server, for the other hosts of a job."""

_STACK_BYTES = 64 * 2**20
"""Stack limit that NVIDIA recommends for training in containers."""
_OF_A_PATH = ("/", ".", "~")
_OF_ANY_IMAGE = ("/bin", "/dev", "/etc", "/lib", "/proc", "/sbin", "/sys", "/usr")
_GPUS = re.compile(r"none|all|[1-9]\d*|device=[\w-]+(?:,[\w-]+)*", re.ASCII)


LABEL = "hvdtrain"
"""Container label by which `hvdtrain ps` finds its containers."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties of this machine that the command depends on.

    Attributes:
        engine: Container engine to use.
        rootless: Whether the engine runs as an ordinary user.
        uid, gid: User and group ID of the user.
        folder: Absolute path of the current folder.
        terminal: Whether standard input and output are a terminal.
        piped: Whether standard input is a pipe or a file. A terminal is passed on only with the output's: a command in
            the background (`hvdtrain docker train.py > log &`) would be stopped for reading it.
        rdma: Whether the machine has InfiniBand or RoCE devices.
        selinux: Whether SELinux is enforcing.
        locks_memory: Whether the engine may lift the limit on locked memory.
    """

    engine: EngineName
    rootless: bool
    uid: int
    gid: int
    folder: Path
    terminal: bool = False
    piped: bool = False
    rdma: bool = False
    selinux: bool = False
    locks_memory: bool = True


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container to run.

    Attributes:
        image: Image built from docker/Dockerfile.cpu or .gpu, or derived from one.
        command: Command to run in the container.
        gpus: `none`, `all`, a number of GPUs, or `device=0,2`.
        several_hosts: Whether ranks run on other hosts too. If so, the container uses the host's network.
        ssh_port: Port of the job's ssh servers, with several hosts.
        ssh_keys: Folder with the job's keys, mounted read-only in the container.
        shm_size: Size of the container's /dev/shm, such as `8g`. None shares the host's.
        user: `UID[:GID]`. None is the current user.
        volumes: `FOLDER[:INSIDE[:OPTIONS]]`, in addition to the current folder.
        env: Names of the environment variables to pass through.
        extra: Additional arguments for the engine.

    Raises:
        UsageError: A setting is invalid, or a folder does not exist.
    """

    image: str
    command: tuple[str, ...]
    gpus: str = "none"
    several_hosts: bool = False
    ssh_port: int = SSH_PORT
    ssh_keys: Path | None = None
    shm_size: str | None = None
    user: str | None = None
    volumes: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_image(self.image)
        if not _GPUS.fullmatch(self.gpus):
            raise UsageError(f"--gpus {self.gpus}: expected all, none, a number, or device=0,2")
        if not 1024 <= self.ssh_port <= 65535:
            raise UsageError(
                f"--ssh-port {self.ssh_port}: the containers' ssh server runs without root, so "
                "choose a port from 1024 to 65535"
            )
        for name in self.env:
            check_name(name)
        if self.several_hosts and self.ssh_keys is None:
            raise UsageError(
                "containers on several hosts reach each other by ssh and need keys: pass their "
                "folder with --ssh-keys (id_ed25519, authorized_keys, known_hosts, as in ~/.ssh; "
                "the same on all hosts)"
            )
        if self.ssh_keys is not None and not self.ssh_keys.is_dir():
            raise UsageError(f"--ssh-keys: no such folder: {self.ssh_keys}")
        for volume in self.volumes:
            source = volume.partition(":")[0]
            if not source:
                raise UsageError(
                    f"--volume {volume!r}: expected a folder, such as /data or /data:/inside"
                )
            is_path = ":" not in volume or volume.startswith(_OF_A_PATH)
            if is_path and not _whole(source).exists():
                raise UsageError(f"--volume {volume}: no such file or folder: {source}")
        if self.extra and not self.extra[0].startswith("-"):
            raise UsageError(
                f"--docker-arg {self.extra[0]}: expected an option, such as --docker-arg=--cpus=4"
            )


def docker_argv(container: Container, machine: Machine) -> list[str]:
    """Return the complete command. It contains the names of environment variables, not their values."""
    return [
        *(machine.engine, "run", "--rm", "--label", LABEL),
        # Podman's --init needs a program that is often not installed; the image brings its own.
        *(["--init"] if machine.engine == "docker" else []),
        # The image's health check tests the ssh server.
        *(["--no-healthcheck"] if container.command != SSHD else []),
        *(["--interactive"] if machine.terminal or machine.piped else []),
        *(["--tty"] if machine.terminal else []),
        *_gpus(container.gpus, machine.engine),
        *_memory(container, machine),
        *_network(container, machine),
        *_user(container, machine),
        *_files(container, machine),
        *(word for name in container.env for word in ("--env", name)),
        *container.extra,
        container.image,
        *container.command,
    ]


def _gpus(gpus: str, engine: EngineName) -> list[str]:
    if gpus == "none":
        return []
    devices = gpus.removeprefix("device=")
    if engine == "docker":
        # Docker parses the value as CSV; unquoted, a comma would end it.
        return ["--gpus", f'"{gpus}"' if "," in gpus else gpus]
    if devices == gpus and gpus != "all":
        devices = ",".join(map(str, range(int(gpus))))
    return [w for one in devices.split(",") for w in ("--device", f"nvidia.com/gpu={one}")]


def _memory(container: Container, machine: Machine) -> list[str]:
    """Options for shared memory and limits: NCCL, MPI and Gloo exchange data in /dev/shm, and lock memory."""
    shared = ["--shm-size", container.shm_size] if container.shm_size else ["--ipc=host"]
    locked = ["--ulimit", "memlock=-1:-1"] if machine.locks_memory else []
    return [*shared, *locked, "--ulimit", f"stack={_STACK_BYTES}:{_STACK_BYTES}"]


def _network(container: Container, machine: Machine) -> list[str]:
    if not container.several_hosts:
        return []
    rdma = ["--device", "/dev/infiniband", "--cap-add", "IPC_LOCK"] if machine.rdma else []
    return [
        "--network=host",
        *rdma,
        *("--env", f"HVDTRAIN_SSH_PORT={container.ssh_port}"),
    ]


def _user(container: Container, machine: Machine) -> list[str]:
    """Options that make files written in the container belong to the user."""
    if container.user is not None:
        return ["--user", container.user]
    if machine.rootless and machine.engine == "docker":
        return ["--user", "0:0"]  # Root in the container is the user on the host.
    keep = ["--userns=keep-id"] if machine.rootless else []
    return [*keep, "--user", f"{machine.uid}:{machine.gid}"]


def _files(container: Container, machine: Machine) -> list[str]:
    volumes = [_same_place(machine.folder), *container.volumes]
    if container.ssh_keys is not None:
        volumes.append(f"{container.ssh_keys.absolute()}:{SSH_KEYS}:ro")
    return [
        *(word for volume in volumes for word in ("--volume", _with_place(volume))),
        *("--workdir", str(machine.folder)),
        # The user's files lack the label that SELinux requires for containers.
        *(["--security-opt", "label=disable"] if machine.selinux else []),
    ]


def _same_place(folder: Path) -> str:
    if ":" in str(folder):
        raise UsageError(f"{folder} has a colon in its name, which no container engine can mount")
    return str(folder)


def _with_place(volume: str) -> str:
    """Mount a volume without a target at the same path in the container.

    The engine needs an absolute path: it takes a bare name for a named volume, and does not expand `~`.
    """
    source, colon, place = volume.partition(":")
    if colon:
        return f"{_whole(source)}:{place}" if volume.startswith(_OF_A_PATH) else volume
    return f"{_whole(source)}:{_whole(source)}"


def _whole(folder: str) -> Path:
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError:  # `~name` of a user who does not exist.
        return Path(folder).absolute()


def passed_names(environ: Mapping[str, str], asked: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the variables to pass to the container: those of the libraries and those in `asked`.

    Raises:
        UsageError: A variable in `asked` has an invalid name or is not set.
    """
    asked = tuple(asked)
    for name in asked:
        check_name(name)
    require_values(asked, environ)
    return into_container(environ, asked)


def check_name(name: str) -> None:
    """Check that `name` is a variable name without a value. Raises UsageError otherwise."""
    if not is_name(name):
        raise UsageError(
            f"--env {name.partition('=')[0]}: pass only the name, and set the value in the environment: "
            "anyone on this machine could read it in the command line"
        )


def check_reachable(paths: Iterable[Path], container: Container, machine: Machine) -> None:
    """Check that all paths on this machine are visible in the container.

    Only the current folder and the volumes are mounted.

    Raises:
        UsageError: A path is outside of them.
    """
    for path in paths:
        # Path.resolve raises for a loop of links, before Python 3.13.
        whole = Path(os.path.realpath(machine.folder / path))
        if not _is_mounted(whole, container, machine):
            raise UsageError(
                f"{path} is not visible in the container, which mounts only {machine.folder}: "
                f"start from a folder that contains it, or add --volume {whole.parent}"
            )


def arguments_out_of_reach(
    arguments: Iterable[str], container: Container, machine: Machine
) -> Iterator[str]:
    """Yield a warning for each argument of the script that names a local file not visible in the container.

    Considers only absolute paths, alone or as in `--data=/data`. System folders exist in every image.
    """
    for argument in arguments:
        path = Path(argument.partition("=")[2] if argument.startswith("-") else argument)
        inside = [
            *_OF_ANY_IMAGE,
            *(volume.split(":")[1] for volume in container.volumes if ":" in volume),
        ]
        known = not path.is_absolute() or any(path.is_relative_to(place) for place in inside)
        # os.path.exists is False for an argument too long to be a path, where Path.exists raises.
        if known or not os.path.exists(path) or _is_mounted(path.resolve(), container, machine):  # noqa: PTH110
            continue
        folder = path if path.is_dir() else path.parent
        yield f"{path} is not visible in the container: if the script reads it, add --volume {folder}"


def _is_mounted(path: Path, container: Container, machine: Machine) -> bool:
    """Whether a path on this machine has the same path in the container."""
    volumes = (volume.split(":") for volume in container.volumes)
    same = (_whole(v[0]) for v in volumes if len(v) == 1 or _whole(v[1]) == _whole(v[0]))
    places = [machine.folder, *same]
    return any(path.is_relative_to(place.resolve()) for place in places)
