"""The CPU image: built from its Dockerfile, it trains, in one container and in two on two hosts."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from containers import IMAGE, Podman, build_cpu_image, podman_of_tests
from jobs import REPOSITORY, SECONDS, user_environment
from namespaces import running_hosts

USER = 4321  # which the image does not know
MEGABYTES = 1900
TRAIN = """
import os
import numpy as np, keras, hvdtrain
rank = hvdtrain.init(0)
x = np.linspace(-1, 1, 96 * 4, dtype="float32").reshape(96, 4)
y = (x.sum(axis=1) > 0).astype("int32")
trainer = hvdtrain.Trainer(
    lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]),
    optimizer=keras.optimizers.SGD(0.5), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    global_batch_size=16, seed=0)
trainer.fit(x, y, epochs=3, verbose=0)
with open(f"here.{rank.rank}", "w") as file:
    print(os.uname().nodename, os.getuid(), os.environ.get("TOKEN"), file=file)
if rank.is_first:
    print("weights", rank.size, *(float(abs(w).sum()) for w in trainer.model.get_weights()))
"""


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """Podman with the CPU image."""
    with podman_of_tests() as tool:
        build_cpu_image(tool)
        yield tool


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the containers' user with the script."""
    folder = tmp_path_factory.mktemp("containers")
    (folder / "train.py").write_text(TRAIN)
    shutil.chown(folder, USER, USER)
    return folder


@pytest.fixture(scope="module")
def expected(work: Path) -> list[float]:
    """The weights of one worker, without a container."""
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=work, env=user_environment(), capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (work / "here.0").unlink()
    ranks, weights = weights_of(done.stdout)
    assert ranks == 1
    return weights


def weights_of(output: str) -> tuple[int, list[float]]:
    found = re.search(r"^weights (\d+) (.*)$", output, re.MULTILINE)
    assert found, output
    return int(found[1]), [float(word) for word in found[2].split()]


def hvdtrain_docker(*words: str) -> list[str]:
    # Podman would ask for more than a sandbox allows.
    limits = ("--docker-arg=--ulimit=nofile=1024:1024", "--docker-arg=--ulimit=nproc=4096:4096")
    options = ("--engine", "podman", "--gpus", "none", "--user", f"{USER}:{USER}", *limits)
    return [sys.executable, "-m", "hvdtrain.cli", "docker", *options, *words]


def test_the_image(podman: Podman) -> None:
    image = json.loads(podman.run("image", "inspect", IMAGE).stdout)[0]
    settings = image["Config"]
    assert settings["User"] == "1000:1000"
    assert settings["Entrypoint"] == ["hvdtrain-entrypoint"]
    assert image["Healthcheck"]["Test"] == ["CMD", "hvdtrain-entrypoint", "health"]
    assert settings["Labels"]["org.opencontainers.image.title"] == "hvdtrain"
    assert image["Size"] < MEGABYTES * 1e6
    # Nothing of the machine that built it: its settings for pip, its certificates, keys of anybody.
    assert not [name for name in settings["Env"] if re.search("PROXY|CERT|PIP_INDEX", name, re.I)]
    layers = layers_of(image)
    assert len(layers) > 5
    baked = [
        path for layer in layers for name in ("etc/pip.conf", "run/secrets/ca.crt", "root/.cache/pip")
        if (path := layer / name).exists() and (path.is_dir() or path.stat().st_size)
        and not (path.is_dir() and not any(path.iterdir()))
    ]  # fmt: skip
    assert baked == []
    keys = subprocess.run(
        ["grep", "-rIlE", "-e", "-----BEGIN [A-Z ]*PRIVATE KEY", *map(str, layers)], capture_output=True, text=True
    )  # fmt: skip
    assert (keys.returncode, keys.stdout) == (1, "")
    # Its programs run as its own user, who cannot change them.
    script = (
        "id -u; hvdtrain --version | head -n 1; touch /opt/hvdtrain/x 2>/dev/null || echo refused"
    )
    said = podman.run("run", "--rm", IMAGE, "bash", "-c", script).stdout.split("\n")
    assert said[0] == "1000" and said[1].startswith("hvdtrain ") and said[2] == "refused"


def layers_of(image: dict[str, object]) -> list[Path]:
    """The folders of its layers, without the base image's."""
    data = image["GraphDriver"]["Data"]  # type: ignore[index]
    return [Path(data["UpperDir"]), *map(Path, data["LowerDir"].split(":")[:-1])]


def test_one_container(podman: Podman, work: Path, expected: list[float]) -> None:
    environment = {**user_environment(), **podman.environment, "TOKEN": "s3cret"}
    done = subprocess.run(
        hvdtrain_docker("-np", "2", "--env", "TOKEN", "train.py"), cwd=work, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks, weights = weights_of(done.stdout)
    assert ranks == 2
    assert weights == pytest.approx(expected, rel=1e-4)
    for rank in (0, 1):
        file = work / f"here.{rank}"
        assert file.read_text().split()[1:] == [str(USER), "s3cret"]
        assert file.stat().st_uid == USER


def test_exit_codes_signals_and_hangs_pass(podman: Podman, work: Path) -> None:
    (work / "fails.py").write_text("raise SystemExit(7)\n")
    (work / "waits.py").write_text("import time\nopen('waiting', 'w').close()\ntime.sleep(600)\n")
    (work / "stops.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    environment = {**user_environment(), **podman.environment}
    options = ("-np", "1", "--controller", "gloo")
    done = subprocess.run(
        hvdtrain_docker(*options, "fails.py"), cwd=work, env=environment, capture_output=True, timeout=SECONDS
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    done = subprocess.run(
        hvdtrain_docker(*options, "--hang-timeout", "3", "stops.py"), cwd=work, env=environment, capture_output=True,
        text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 124, done.stderr
    assert re.search(r"^rank 0 \(process \d+\) is stopped \(SIGSTOP\)", done.stderr, re.MULTILINE)
    running = subprocess.Popen(hvdtrain_docker(*options, "waits.py"), cwd=work, env=environment)
    try:
        wait_until(lambda: (work / "waiting").exists())
    finally:
        running.send_signal(signal.SIGTERM)
        code = running.wait(SECONDS)
    assert code == 143
    assert podman.run("ps", "--all", "--quiet").stdout == ""


def test_ps_logs_and_stop(podman: Podman, work: Path) -> None:
    (work / "waits.py").write_text(
        "import time\nprint('loud and clear', flush=True)\nopen('talking', 'w').close()\ntime.sleep(600)\n"
    )
    environment = {**user_environment(), **podman.environment}

    def hvdtrain(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hvdtrain.cli", *words], cwd=work, env=environment, capture_output=True, text=True,
            timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout + done.stderr

    running = subprocess.Popen(
        hvdtrain_docker("-np", "1", "--controller", "gloo", "waits.py"), cwd=work, env=environment
    )
    try:
        wait_until(lambda: (work / "talking").exists())
        (line,) = [one for one in hvdtrain("ps").splitlines() if "waits.py" in one]
        name, kind, state, *_ = line.split()
        assert (kind, state) == ("container", "running")
        assert podman.run("ps", "--quiet").stdout.startswith(name)
        assert "loud and clear" in hvdtrain("logs", name)
        hvdtrain("stop", name)
        assert running.wait(SECONDS) == 143
    finally:
        running.kill()
    assert "waits.py" not in hvdtrain("ps")
    assert podman.run("ps", "--all", "--quiet").stdout == ""


def test_containers_on_two_hosts(
    podman: Podman, work: Path, expected: list[float], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    shutil.chown(keys, USER, USER)
    mounted = f"{keys}:/run/hvdtrain/ssh"
    podman.run("run", "--rm", "--user", str(USER), "--volume", mounted, IMAGE, "keys")
    assert (keys / "id_ed25519").stat().st_mode & 0o777 == 0o600
    with running_hosts(tmp_path, ["host1", "host2"]) as hosts:
        names = [f"--docker-arg=--add-host={host.name}:{host.address}" for host in hosts.values()]
        environment = {**user_environment(), **podman.environment, "TOKEN": "s3cret"}

        def on(host: str, *words: str) -> list[str]:
            """hvdtrain docker, where `--network=host` is that host's network."""
            space = ["nsenter", f"--target={hosts[host].pid}", "--net", "--uts", "--"]
            return [*space, *hvdtrain_docker("--ssh-keys", str(keys), *names, *words)]

        server = subprocess.Popen(
            on("host2", "--sshd", "--docker-arg=--name=host2"), cwd=work, env=environment, stdin=subprocess.DEVNULL
        )  # fmt: skip
        try:
            # Podman runs the check in the network where podman is.
            place = ["nsenter", f"--target={hosts['host2'].pid}", "--net", "--"]
            check = [*place, "podman", "healthcheck", "run", "host2"]
            wait_until(
                lambda: not subprocess.run(check, env=environment, capture_output=True).returncode
            )
            for controller in ("gloo", "mpi"):
                for rank in (0, 1):
                    (work / f"here.{rank}").unlink(missing_ok=True)
                done = subprocess.run(
                    on("host1", "-H", "host1:1,host2:1", "--controller", controller, "--env", "TOKEN",
                       "--network-interfaces", "eth0", "train.py"),
                    cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                    timeout=SECONDS,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
                ranks, weights = weights_of(done.stdout)
                assert ranks == 2
                assert weights == pytest.approx(expected, rel=1e-4), controller
                where = [(work / f"here.{rank}").read_text().split() for rank in (0, 1)]
                assert where == [[name, str(USER), "s3cret"] for name in ("host1", "host2")]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(SECONDS)
    assert podman.run("ps", "--all", "--quiet").stdout == ""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_server_without_keys_says_so(podman: Podman) -> None:
    done = podman.run("run", "--rm", IMAGE, "sshd", check=False)
    assert done.returncode == 1
    assert "no key may log in: user 1000 finds no readable authorized_keys" in done.stderr


def test_compose(podman: Podman, tmp_path: Path) -> None:
    """docker/compose.yaml trains on its two hosts.

    Changed here: limits that a sandbox may not set; podman's --init, which is often not installed; the wait for
    host2's health check, which podman leaves to systemd; the number of epochs.
    """
    if shutil.which("podman-compose", path=user_environment()["PATH"]) is None:
        pytest.skip("needs podman-compose: pip install podman-compose")
    compose = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())
    services = compose["services"]
    del services["keys"]["build"]
    for name in ("host1", "host2"):
        services[name]["ulimits"] = {"nofile": 1024, "nproc": 4096}
        del services[name]["init"]
    services["host1"]["depends_on"]["host2"]["condition"] = "service_started"
    services["host1"]["command"] += ["--epochs", "2"]
    (tmp_path / "docker").mkdir()
    (tmp_path / "scripts").symlink_to(REPOSITORY / "scripts")
    (tmp_path / "docker/compose.yaml").write_text(yaml.safe_dump(compose))
    project = "hvdtrain-test"
    environment = {**user_environment(), **podman.environment, "COMPOSE_PROJECT_NAME": project}

    def command(*words: str) -> None:
        done = subprocess.run(
            ["podman-compose", "--in-pod", "false", *words], cwd=tmp_path / "docker", env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout

    try:
        command("up", "--detach")
        code = podman.run("wait", f"{project}_host1_1", timeout=SECONDS).stdout.strip()
        logs = [podman.run("logs", f"{project}_host{n}_1") for n in (1, 2)]
    finally:
        command("down", "--volumes")
    assert code == "0", logs
    accuracy = re.search(r"validation accuracy (\S+)", logs[0].stdout)
    assert accuracy and float(accuracy[1]) > 0.7, logs
    assert "Accepted publickey for hvdtrain" in logs[1].stderr
