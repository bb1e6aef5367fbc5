"""`hvdtrain docker`: `hvdtrain run` in a container."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.config import texts_of
from hvdtrain.cli.options import expanded
from hvdtrain.cli.run import print_command, run
from hvdtrain.errors import UsageError
from hvdtrain.launch.container.command import (
    CPU_IMAGE,
    GPU_IMAGE,
    SSH_PORT,
    SSHD,
    Container,
    Machine,
    check_reachable,
    docker_argv,
    passed_names,
)
from hvdtrain.launch.container.engine import (
    ContainerEngine,
    check_gpus,
    check_image,
    find_container_engine,
)

# Run options that say that ranks are on other hosts, or are given as paths of this machine.
_OF_SEVERAL_HOSTS = {"hosts", "hostfile", "host_discovery_script"}
_FILES = {
    *("hostfile", "config", "host_discovery_script", "ssh_identity_file", "log_dir"),
    # Written in the container, and lost with it if their folder is not the machine's.
    *("output_filename", "timeline_filename", "autotune_log_file"),
}

# Its number in Linux.
CAP_SYS_RESOURCE = 24


@dataclass(frozen=True)
class RunPart:
    """The part of the command line that is `hvdtrain run`'s.

    Attributes:
        words: as they were written.
        options: names of the options among them -> the value, if they have one.
        script: the training script, if it is there (a configuration file may name it).
    """

    words: tuple[str, ...]
    options: dict[str, str]
    script: str | None


def split(words: Sequence[str], own: click.Command) -> tuple[list[str], RunPart]:
    """Part the command line: options of `own` before the script, and `hvdtrain run`'s.

    Options of both may be mixed; what follows the script is the script's own. What neither knows goes to
    `hvdtrain run`, which says so.
    """
    mine, theirs = _options_of(own), _options_of(run)
    own_words: list[str] = []
    run_words: list[str] = []
    seen: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, value = rest[0].partition("=")
        option = mine.get(name) or theirs.get(name)
        # A flag, and an option with `=`, is one word.
        length = 1 if option is None or option.is_flag or equals else 1 + option.nargs
        (own_words if name in mine else run_words).extend(rest[:length])
        if option is not None and option.name and name in theirs:
            seen[option.name] = value if equals else "".join(rest[1:2] if length > 1 else [])
        rest = rest[length:]
    script = next((word for word in rest if word != "--"), None)
    return own_words, RunPart((*run_words, *rest), seen, script)


def _options_of(command: click.Command) -> dict[str, click.Option]:
    options = [one for one in command.params if isinstance(one, click.Option)]
    known = {name: one for one in options for name in (*one.opts, *one.secondary_opts)}
    if command is not run:
        known |= dict.fromkeys(("-h", "--help"), click.Option(["--help"], is_flag=True))
    return known


class TwoCommands(click.Command):
    """Takes the options of `hvdtrain run` as well, unread."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own_words, ctx.obj = split(args, self)
        return super().parse_args(ctx, own_words)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "[OPTIONS OF hvdtrain run]", "SCRIPT", "[ARGUMENTS]..."]


@click.command(cls=TwoCommands)
@click.option(
    "--image", metavar="IMAGE",
    help=f"Image to run, made from docker/Dockerfile.* or on top of one.  [default: {GPU_IMAGE} with GPUs, else "
    f"{CPU_IMAGE}]",
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["auto", "docker", "podman"]), default="auto", show_default=True,
    help="What runs the container; auto: the first that answers.",
)  # fmt: skip
@click.option(
    "--gpus", default="auto", show_default=True, metavar="GPUS",
    help="all, none, how many, or device=0,2; auto: all, if this machine has NVIDIA's driver.",
)  # fmt: skip
@click.option(
    "--shm-size", metavar="SIZE",
    help="Give it a /dev/shm of its own, such as 8g.  [default: shares the machine's, --ipc=host]",
)  # fmt: skip
@click.option(
    "--volume", "volumes", multiple=True, metavar="FOLDER[:INSIDE[:OPTIONS]]",
    help="One more folder for the container, which has the current folder at the same place.",
)  # fmt: skip
@click.option(
    "--env", multiple=True, metavar="NAME",
    help="Give it, and all workers, this variable of the environment, by its name only. It gets all that begin with "
    "HVDTRAIN_, HOROVOD_, TF_, XLA_, NCCL_, UCX_ or OMPI_MCA_.",
)  # fmt: skip
@click.option("--user", metavar="UID[:GID]", help="Who runs in it.  [default: you]")
@click.option(
    "--ssh-keys", type=click.Path(path_type=Path), metavar="FOLDER",
    help="Several hosts: keys to reach each other, the same on all: id_ed25519, authorized_keys, known_hosts. "
    "The image makes them: docker run --rm --user $(id -u) -v FOLDER:/run/hvdtrain/ssh IMAGE keys",
)  # fmt: skip
@click.option(
    "--ssh-port", type=int, default=SSH_PORT, show_default=True, metavar="PORT",
    help="Several hosts: where the ssh servers in their containers listen.",
)  # fmt: skip
@click.option(
    "--sshd", is_flag=True,
    help="Several hosts: run this on each but the first, in the same folder, before the job; Ctrl-C ends it.",
)  # fmt: skip
@click.option(
    "--docker-arg", "extra", multiple=True, metavar="ARGUMENT",
    help="One more argument for docker run or podman run: --docker-arg=--cpus=4",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the command, and do not run it.")
@click.pass_context
def docker(
    ctx: click.Context, image: str | None, engine: str, gpus: str, sshd: bool, ssh_port: int, env: tuple[str, ...],
    dry_run: bool, **settings: Any,
) -> None:  # fmt: skip
    """Run SCRIPT on several workers in a container, with this machine's GPUs.

    It is `hvdtrain run` inside, and takes all its options; the current folder is in the container at the same
    place. The exit code is that of the run; 125 to 127 are the engine's own.

    Several hosts: `hvdtrain docker --sshd --ssh-keys FOLDER` on all but the first, then on the first
    `hvdtrain docker --ssh-keys FOLDER -H node1:4,node2:4 SCRIPT`.
    """
    part: RunPart = ctx.obj
    if gpus == "auto":
        gpus = "all" if Path("/proc/driver/nvidia/version").exists() else "none"
    names = passed_names(os.environ, env)
    said = _settings(part, names)
    several_hosts = sshd or bool(_OF_SEVERAL_HOSTS & said.keys())
    command = SSHD if sshd else _run_command(part, said, env, ssh_port if several_hosts else None)
    container = Container(
        image=image or (CPU_IMAGE if gpus == "none" else GPU_IMAGE),
        command=command,
        gpus=gpus,
        several_hosts=several_hosts,
        ssh_port=ssh_port,
        env=names,
        **settings,
    )
    found = _engine(engine, dry_run)
    machine = _machine(found)
    if sshd and part.words:
        raise UsageError(f"--sshd runs no script: leave {' '.join(part.words)} out")
    if not sshd:
        _check_paths(part, said, container, machine)
    argv = docker_argv(container, machine)
    if dry_run:
        print_command(argv)
        return
    if gpus != "none":
        check_gpus(found)
    check_image(found, container.image)
    # In place of this process: signals, terminal and exit code are the engine's, with nobody between.
    os.execvp(argv[0], argv)


def _settings(part: RunPart, names: Sequence[str]) -> dict[str, str]:
    """What `hvdtrain run` will go by: its options, else HVDTRAIN_<NAME> of those that it gets, else a file's."""
    variables = {one.name: f"HVDTRAIN_{one.name.upper()}" for one in run.params if one.name}
    by_variable = {
        option: os.environ[name]
        for option, name in variables.items()
        if name in names and os.environ[name]
    }
    said = by_variable | part.options
    return (texts_of(expanded(said["config"]), run) if "config" in said else {}) | said


def _run_command(
    part: RunPart, settings: Mapping[str, str], env: Sequence[str], ssh_port: int | None
) -> tuple[str, ...]:
    if part.script is None and "config" not in settings:
        raise UsageError("which script? hvdtrain docker -np 4 train.py")
    port = ("--ssh-port", str(ssh_port)) if ssh_port is not None else ()
    names = (word for name in env for word in ("--env", name))
    return ("hvdtrain", "run", *port, *names, *part.words)


def _check_paths(
    part: RunPart, settings: Mapping[str, str], container: Container, machine: Machine
) -> None:
    """Raises UsageError if the script, or a file that an option names, is not there, or not in the container."""
    files = [settings[name] for name in sorted(_FILES & settings.keys())]
    script = part.script or settings.get("script")
    check_reachable(map(Path, (*files, *([script] if script else []))), container, machine)
    if part.script is not None and not (machine.folder / part.script).is_file():
        raise UsageError(f"no such script: {part.script} (in {machine.folder})")


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
        rdma=Path("/dev/infiniband").is_dir(),
        selinux=enforcing.exists() and enforcing.read_text().strip() == "1",
        locks_memory=by_daemon or may_lift_limits(),
    )


def may_lift_limits() -> bool:
    """Whether a program of this user may lock as much memory as it likes."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        return True
    status = Path("/proc/self/status")
    found = re.search(r"^CapEff:\s*(\w+)$", status.read_text(), re.M) if status.exists() else None
    return found is not None and bool(int(found[1], 16) >> CAP_SYS_RESOURCE & 1)
