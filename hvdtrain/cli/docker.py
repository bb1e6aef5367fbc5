"""`hvdtrain docker`: `hvdtrain run` in a container."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.cli.forwarded_options import RunPart, ThroughRun
from hvdtrain.cli.launch_options import PATH
from hvdtrain.cli.run import print_command, run
from hvdtrain.errors import UsageError
from hvdtrain.launch.container.container_command import (
    CPU_IMAGE,
    GPU_IMAGE,
    SSH_PORT,
    SSHD,
    Container,
    Machine,
    arguments_out_of_reach,
    check_reachable,
    docker_argv,
    passed_names,
)
from hvdtrain.launch.container.container_engine import (
    ContainerEngine,
    check_gpus,
    check_image,
    find_container_engine,
)
from hvdtrain.launch.user_files import check_script

# Options of a run on several hosts.
_OF_SEVERAL_HOSTS = {"hosts", "hostfile", "host_discovery_script"}
# What the run reads must be in the container; what it writes is lost with it elsewhere.
_FILES = sorted(str(one.name) for one in run.params if one.type is PATH and one.name != "script")

# Its number in Linux.
CAP_SYS_RESOURCE = 24


@click.command(cls=ThroughRun)
@click.option(
    "--image", metavar="IMAGE",
    help=f"Image built from docker/Dockerfile.*, or based on one of those.  [default: {GPU_IMAGE} with GPUs, else "
    f"{CPU_IMAGE}]",
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["auto", "docker", "podman"]), default="auto", show_default=True,
    help="Container engine. auto: docker if it is running, else podman.",
)  # fmt: skip
@click.option(
    "--gpus", default="auto", show_default=True, metavar="GPUS",
    help="GPUs for the container: all, none, a number, or device=0,2. auto: all, if NVIDIA's driver is loaded.",
)  # fmt: skip
@click.option(
    "--shm-size", metavar="SIZE",
    help="Give the container its own /dev/shm of this size, such as 8g.  [default: the host's, --ipc=host]",
)  # fmt: skip
@click.option(
    "--volume", "volumes", multiple=True, metavar="FOLDER[:INSIDE[:OPTIONS]]",
    help="Mount another folder, at the same path or at INSIDE. May be repeated.",
)  # fmt: skip
@click.option(
    "--env", multiple=True, metavar="NAME",
    help="Pass this environment variable to the container and all workers, by name. Those that begin with HVDTRAIN_, "
    "HOROVOD_, TF_, XLA_, NCCL_, UCX_ or OMPI_MCA_ are always passed. May be repeated.",
)  # fmt: skip
@click.option("--user", metavar="UID[:GID]", help="User in the container.  [default: yourself]")
@click.option(
    "--ssh-keys", type=PATH, metavar="FOLDER",
    help="For several hosts: id_ed25519, authorized_keys and known_hosts, the same on all hosts. To create them: "
    "docker run --rm --user $(id -u) -v FOLDER:/run/hvdtrain/ssh IMAGE keys",
)  # fmt: skip
@click.option(
    "--ssh-port", type=int, default=SSH_PORT, show_default=True, metavar="PORT",
    help="For several hosts: port of the ssh servers in the containers.",
)  # fmt: skip
@click.option(
    "--sshd", is_flag=True,
    help="For several hosts: run an ssh server that waits for the job, on each host but the first. Start it "
         "in the same folder; Ctrl-C ends it.",
)  # fmt: skip
@click.option(
    "--docker-arg", "extra", multiple=True, metavar="ARGUMENT",
    help="Pass another argument to docker run or podman run, such as --docker-arg=--cpus=4. May be repeated.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the command; do not run it.")
@click.pass_context
def docker(
    ctx: click.Context, image: str | None, engine: str, gpus: str, sshd: bool, ssh_port: int, env: tuple[str, ...],
    dry_run: bool, **settings: Any,
) -> None:  # fmt: skip
    """Run SCRIPT on several workers in a container, with this machine's GPUs.

    Accepts all options of `hvdtrain run`, which is what runs in the container. The current folder is mounted at the
    same path. The exit code is that of the run; 125 to 127 come from docker or podman.

    For several hosts, start `hvdtrain docker --sshd --ssh-keys FOLDER` on each host but the first; then, on the first,
    run `hvdtrain docker --ssh-keys FOLDER -H node1:4,node2:4 SCRIPT`.
    """
    part: RunPart = ctx.obj
    if sshd and part.words:
        raise UsageError(f"--sshd does not run a script: leave {' '.join(part.words)} out")
    if gpus == "auto":
        gpus = "all" if Path("/proc/driver/nvidia/version").exists() else "none"
    names = passed_names(os.environ, env)
    said = {} if sshd else _settings(part.read(ctx), names)
    several_hosts = sshd or any(said.get(name) for name in _OF_SEVERAL_HOSTS)
    command = SSHD if sshd else _run_command(part, env, ssh_port if several_hosts else None)
    container = Container(
        image=image if image is not None else CPU_IMAGE if gpus == "none" else GPU_IMAGE,
        command=command,
        gpus=gpus,
        several_hosts=several_hosts,
        ssh_port=ssh_port,
        env=names,
        **settings,
    )
    found = _engine(engine, dry_run)
    machine = _machine(found)
    if not sshd:
        _check_paths(said, container, machine)
        for warning in arguments_out_of_reach(said["arguments"], container, machine):
            click.echo(f"Warning: {warning}", err=True)
    argv = docker_argv(container, machine)
    if dry_run:
        print_command(argv)
        return
    if gpus != "none":
        check_gpus(found)
    check_image(found, container.image)
    # In place of this process: signals, terminal and exit code are the engine's, with nobody between.
    os.execvp(argv[0], argv)


def _settings(ctx: click.Context, names: Sequence[str]) -> dict[str, Any]:
    """The options that `hvdtrain run` goes by in the container, which has only these variables of ours."""

    def is_here(name: str) -> bool:
        by_variable = ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT
        return not by_variable or f"HVDTRAIN_{name.upper()}" in names

    return {name: value for name, value in ctx.params.items() if is_here(name)}


def _run_command(part: RunPart, env: Sequence[str], ssh_port: int | None) -> tuple[str, ...]:
    port = ("--ssh-port", str(ssh_port)) if ssh_port is not None else ()
    names = (word for name in env for word in ("--env", name))
    return ("hvdtrain", "run", *port, *names, *part.words)


def _check_paths(said: Mapping[str, Any], container: Container, machine: Machine) -> None:
    """Raises UsageError if the script, or a file that an option names, is not there, or not in the container."""
    files = [said[name] for name in _FILES if said.get(name)]
    script: Path = said["script"]
    # Any other word may be a program of the image.
    is_file = script.suffix == ".py" or len(script.parts) > 1 or script.is_file()
    if said["module"] or not is_file:
        check_reachable(files, container, machine)
        return
    check_reachable([*files, script], container, machine)
    check_script(script)


def _engine(wanted: str, dry_run: bool) -> ContainerEngine:
    """The engine; to print the command one that is named need not be here."""
    if dry_run and wanted == "docker":
        return ContainerEngine("docker", rootless=False, has_gpus=True)
    if dry_run and wanted == "podman":
        return ContainerEngine("podman", rootless=os.getuid() != 0, has_gpus=True)
    return find_container_engine(wanted)


def _machine(engine: ContainerEngine) -> Machine:
    enforcing = Path("/sys/fs/selinux/enforce")
    # Docker's daemon is root; podman, and a rootless daemon, have the limits of the user.
    by_daemon = engine.name == "docker" and not engine.rootless
    return Machine(
        engine=engine.name,
        rootless=engine.rootless,
        uid=os.getuid(),
        gid=os.getgid(),
        folder=Path.cwd(),
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
        piped=not sys.stdin.isatty(),
        rdma=Path("/dev/infiniband").is_dir(),
        selinux=enforcing.exists() and enforcing.read_text().strip() == "1",
        locks_memory=by_daemon or may_lift_limits(),
    )


def may_lift_limits() -> bool:
    """Whether a program of this user may lock as much memory as it likes."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        return True
    status = Path("/proc/self/status")
    text = status.read_text(errors="replace") if status.exists() else ""
    found = re.search(r"^CapEff:\s*(\w+)$", text, re.M)
    return found is not None and bool(int(found[1], 16) >> CAP_SYS_RESOURCE & 1)
