"""`hvdtrain docker`: what it prints is what docker or podman would run."""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdtrain.cli.command_table import main
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.container.container_command import (
    Container,
    Machine,
    docker_argv,
    passed_names,
)
from hvdtrain.launch.container.container_engine import ContainerEngine, ask_engine, check_gpus

MACHINE = Machine(
    engine="docker", rootless=False, uid=1000, gid=100, folder=Path("/home/ann/digits")
)
CONTAINER = Container(image="hvdtrain:cpu", command=("hvdtrain", "run", "-np", "2", "train.py"))
STACK = "--ulimit stack=67108864:67108864"
FOLDER = "--volume /home/ann/digits:/home/ann/digits --workdir /home/ann/digits"
END = "hvdtrain:cpu hvdtrain run -np 2 train.py"


def printed(container: Container, machine: Machine) -> str:
    return shlex.join(docker_argv(container, machine))


def test_the_whole_command_of_each_engine() -> None:
    common = f"--ulimit memlock=-1:-1 {STACK} --user 1000:100 {FOLDER} {END}"
    assert (
        printed(CONTAINER, MACHINE)
        == f"docker run --rm --label hvdtrain --init --no-healthcheck --ipc=host {common}"
    )
    podman = replace(MACHINE, engine="podman")
    assert (
        printed(CONTAINER, podman)
        == f"podman run --rm --label hvdtrain --no-healthcheck --ipc=host {common}"
    )


def test_the_whole_command_of_one_of_several_hosts(tmp_path: Path) -> None:
    container = replace(CONTAINER, gpus="all", several_hosts=True, ssh_port=2345, ssh_keys=tmp_path,
                        env=("HF_TOKEN", "NCCL_DEBUG"), extra=("--cpus=4",))  # fmt: skip
    assert printed(container, replace(MACHINE, rdma=True)) == (
        f"docker run --rm --label hvdtrain --init --no-healthcheck --gpus all --ipc=host --ulimit memlock=-1:-1 "
        f"{STACK} --network=host --device /dev/infiniband --cap-add IPC_LOCK --env HVDTRAIN_SSH_PORT=2345 "
        f"--user 1000:100 --volume /home/ann/digits:/home/ann/digits --volume {tmp_path}:/run/hvdtrain/ssh:ro "
        f"--workdir /home/ann/digits --env HF_TOKEN --env NCCL_DEBUG --cpus=4 {END}"
    )


@pytest.mark.parametrize(
    ("gpus", "docker", "podman"),
    [
        ("none", [], []),
        ("all", ["--gpus", "all"], ["--device", "nvidia.com/gpu=all"]),
        ("1", ["--gpus", "1"], ["--device", "nvidia.com/gpu=0"]),
        ("2", ["--gpus", "2"], ["--device", "nvidia.com/gpu=0", "--device", "nvidia.com/gpu=1"]),
        ("device=3", ["--gpus", "device=3"], ["--device", "nvidia.com/gpu=3"]),
        (
            "device=0,2",
            ["--gpus", '"device=0,2"'],
            ["--device", "nvidia.com/gpu=0", "--device", "nvidia.com/gpu=2"],
        ),
    ],
)
def test_gpus(gpus: str, docker: list[str], podman: list[str]) -> None:
    for engine, words in (("docker", docker), ("podman", podman)):
        machine = replace(MACHINE, engine=engine)
        without = docker_argv(CONTAINER, machine)
        at = without.index("--ipc=host")
        expected = [*without[:at], *words, *without[at:]]
        assert docker_argv(replace(CONTAINER, gpus=gpus), machine) == expected


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_what_a_rootless_engine_writes_belongs_to_the_user(engine: str) -> None:
    machine = replace(MACHINE, engine=engine, rootless=True)
    text = printed(CONTAINER, machine)
    user = "--user 0:0" if engine == "docker" else "--userns=keep-id --user 1000:100"
    assert f" {user} --volume" in text
    chosen = printed(replace(CONTAINER, user="5:6"), machine)
    assert " --user 5:6 " in chosen and "keep-id" not in chosen


def test_smaller_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = printed(replace(CONTAINER, shm_size="8g"), MACHINE)
    assert "--shm-size 8g" in own and "--ipc" not in own
    terminal = printed(CONTAINER, replace(MACHINE, terminal=True))
    assert terminal.startswith(
        "docker run --rm --label hvdtrain --init --no-healthcheck --interactive --tty --ipc=host"
    )
    piped = printed(CONTAINER, replace(MACHINE, piped=True))
    assert " --no-healthcheck --interactive --ipc=host" in piped
    volumes = printed(replace(CONTAINER, volumes=(str(tmp_path), "data:/data:ro")), MACHINE)
    assert f"--volume {tmp_path}:{tmp_path} --volume data:/data:ro --workdir" in volumes
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    home = printed(replace(CONTAINER, volumes=("~/", "~/x:/y:ro")), MACHINE)
    assert f"--volume {tmp_path}:{tmp_path} --volume {tmp_path}/x:/y:ro --workdir" in home
    labelled = printed(CONTAINER, replace(MACHINE, selinux=True))
    assert f"--workdir /home/ann/digits --security-opt label=disable {END}" in labelled
    assert "memlock" not in printed(CONTAINER, replace(MACHINE, locks_memory=False))
    assert "infiniband" not in printed(CONTAINER, replace(MACHINE, rdma=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": "some"}, "--gpus some: expected all, none, a number, or device=0,2"),
        ({"gpus": "0"}, "--gpus 0: expected all"),
        ({"ssh_port": 22}, "--ssh-port 22: .* from 1024 to 65535"),
        ({"several_hosts": True}, "several hosts .* need keys: .* --ssh-keys"),
        ({"ssh_keys": Path("/no/keys")}, "no such folder: /no/keys"),
        (
            {"volumes": ("/no/data:/data",)},
            "--volume /no/data:/data: no such file or folder: /no/data",
        ),
        ({"volumes": ("~nobody-here:/x",)}, "no such file or folder: ~nobody-here"),
        ({"volumes": ("",)}, "--volume '': expected a folder"),
        ({"volumes": ("nodata",)}, "--volume nodata: no such file or folder: nodata"),
        ({"extra": ("cpus=4",)}, "--docker-arg cpus=4: expected an option"),
        ({"env": ("A=b",)}, "--env A: pass only the name"),
        ({"image": "--privileged"}, "'--privileged' is not an image"),
        ({"image": ""}, "'' is not an image"),
    ],
)
def test_what_cannot_work_is_said(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONTAINER, **change)


def test_a_folder_that_cannot_be_mounted() -> None:
    with pytest.raises(UsageError, match="has a colon in its name"):
        docker_argv(CONTAINER, replace(MACHINE, folder=Path("/a:b")))


def test_variables_by_name() -> None:
    environ = dict.fromkeys(
        (
            "TF_A;touch x;B=1",
            "TF_A B",
            "NCCL_DEBUG",
            "HVDTRAIN_NP",
            "HVDTRAIN_CACHE",
            "TOKEN",
            "HOME",
        ),
        "x",
    )
    assert passed_names(environ, ()) == ("HVDTRAIN_NP", "NCCL_DEBUG")
    assert passed_names(environ, ("TOKEN", "NCCL_DEBUG")) == ("HVDTRAIN_NP", "NCCL_DEBUG", "TOKEN")
    with pytest.raises(UsageError, match="--env OTHER: not set in this environment"):
        passed_names(environ, ("OTHER",))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, where programs are found only in `bin`."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("")
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in os.environ:
        if name.startswith(("HVDTRAIN_", "HOROVOD_", "TF_", "TF2_", "NCCL_")):
            monkeypatch.delenv(name)
    return folder


def add_engine(work: Path, name: str, script: str) -> None:
    program = work.parent / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def call(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["docker", "--gpus", "none", *words])
    return done.exit_code, done.output


def test_the_command_line(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    keys = work / "keys"
    keys.mkdir()
    code, text = call("--dry-run", "--engine", "docker", "--ssh-keys", "keys", "--env", "SECRET",
                      "-H", "a:2,b:2", "--ssh-port", "2300", "train.py", "--lr", "1")  # fmt: skip
    assert code == 0
    assert "s3cret" not in text
    assert f" --volume {work}:{work} --volume {keys}:/run/hvdtrain/ssh:ro " in text
    assert text.endswith(
        " --env SECRET hvdtrain:cpu hvdtrain run --ssh-port 2300 --env SECRET --hosts a:2,b:2 train.py --lr 1\n"
    )
    code, text = call("--dry-run", "--engine", "docker", "train.py", "--api-key", "s3cret")
    assert code == 0
    assert " train.py --api-key '***'\nbefore you paste this, replace *** with " in text
    code, text = call("--dry-run", "--engine", "docker", "--ssh-keys", "keys", "--sshd")
    assert code == 0
    assert "--network=host" in text and text.endswith(" hvdtrain:cpu sshd\n")
    assert "--no-healthcheck" not in text


def test_data_that_the_container_does_not_see_is_named(work: Path) -> None:
    data = work.parent / "data"
    data.mkdir()
    (data / "x.npz").touch()
    words = (
        "--dry-run",
        "--engine",
        "docker",
        "train.py",
        f"--data={data}/x.npz",
        str(data),
        f"{work}/y",
    )
    warning = "is not visible in the container: if the script reads it, add --volume"
    code, text = call(*words, "/dev/null", "/no/file", "x" * 5000)
    assert code == 0 and text.count(warning) == 2
    assert f"Warning: {data}/x.npz {warning} {data}\n" in text
    assert warning not in call("--volume", str(data), *words)[1]
    assert warning not in call("--volume", f"{work}:{data}", *words)[1]
    assert warning in call("--volume", f"{data}:/elsewhere", *words)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "2", "other.py"], "no such script: other.py"),
        (["-np", "2", "~no-one/train.py"], "no such script: ~no-one/train.py"),
        (["-np", "2", "loop.py"], "no such script: loop.py"),
        (["-np", "2", "../away.py"], "../away.py is not visible in the container"),
        (["--config", "../run.yaml"], "../run.yaml is not visible in the container"),
        (
            ["--timeline-filename", "/t/t.json", "train.py"],
            "/t/t.json is not visible in the container",
        ),
        (["--output-filename=../out", "train.py"], "../out is not visible in the container"),
        (["--autotune-log-file", "/a.csv", "train.py"], "/a.csv is not visible in the container"),
        (["--config", "files.yaml"], "/t/t.json is not visible in the container"),
        (["--config", "hosts.yaml", "train.py"], "containers on several hosts"),
        (["--config", "none.yaml", "train.py"], "cannot read the configuration none.yaml"),
        (["-np", "2"], "Missing argument 'SCRIPT'"),
        (["-H", "a:1,b:1", "train.py"], "containers on several hosts"),
        (
            ["--sshd", "--ssh-keys", ".", "train.py"],
            "--sshd does not run a script: leave train.py out",
        ),
        (["--env", "A=1", "train.py"], "--env A: pass only the name"),
    ],
)
def test_mistakes_are_said_before_anything_starts(
    work: Path, words: list[str], message: str
) -> None:
    (work.parent / "run.yaml").write_text("script: train.py\n")
    (work / "hosts.yaml").write_text("hosts: {a: 2, b: 2}\n")
    (work / "files.yaml").write_text("script: train.py\ntimeline: {filename: /t/t.json}\n")
    (work / "loop.py").symlink_to("loop.py")
    code, text = call("--dry-run", "--engine", "docker", *words)
    assert (code, message in text) == (2, True), text


def test_hosts_may_stand_in_the_environment_or_a_file(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--dry-run", "--engine", "docker", "--ssh-keys", ".")
    (work / "hosts.yaml").write_text("script: train.py\nhosts: {a: 2, b: 2}\n")
    code, text = call(*words, "--config", "hosts.yaml")
    assert (code, " --network=host " in text) == (0, True)
    assert "--network=host" not in call(*words, "-np", "2", "train.py")[1]
    monkeypatch.setenv("HVDTRAIN_HOSTS", "a:2,b:2")
    code, text = call(*words, "train.py")
    assert (code, " --network=host " in text) == (0, True)


def test_which_engine(work: Path) -> None:
    code, text = call("-np", "2", "train.py")
    assert code == 1
    assert "docker is not installed\n  podman is not installed" in text
    add_engine(work, "docker", "echo 'Cannot connect to the daemon' >&2; exit 1")
    assert "docker does not answer: Cannot connect to the daemon" in call("train.py")[1]
    # Docker's client without its daemon is no engine.
    add_engine(work, "podman", 'echo \'{"host": {"security": {"rootless": true}}}\'')
    code, text = call("--dry-run", "-np", "2", "train.py")
    assert code == 0
    assert text.startswith("podman run --rm --label hvdtrain ") and "--userns=keep-id" in text


def test_an_image_that_was_not_built(work: Path) -> None:
    add_engine(work, "docker", '[ "$1" = info ] && echo "{}"')
    code, text = call("-np", "2", "train.py")
    assert code == 1
    assert "  docker build --file docker/Dockerfile.cpu --tag hvdtrain:cpu .\n" in text


def test_an_engine_without_gpus(work: Path) -> None:
    said = '{"Runtimes": {"runc": {}, "nvidia": {}}, "SecurityOptions": ["name=rootless"]}'
    add_engine(work, "docker", f"echo '{said}'")
    found = ask_engine("docker", os.environ, cdi_folders=())
    assert found == ContainerEngine("docker", rootless=True, has_gpus=True)
    check_gpus(found)
    for name in ("docker", "podman"):
        with pytest.raises(HvdtrainError, match=f"{name} cannot give GPUs .* nvidia-ctk"):
            check_gpus(ContainerEngine(name, rootless=False, has_gpus=False))
