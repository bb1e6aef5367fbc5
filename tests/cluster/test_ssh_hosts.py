"""Launches over ssh on several hosts: they train alike, say what is wrong, hide what is secret, and
leave nothing on any host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hanging
import numpy as np
import pytest
from jobs import RANK, SECONDS, user_environment
from mnist import MNIST, TOLERANCE, weights
from namespaces import NamespaceHost, child_of

Hosts = dict[str, NamespaceHost]
END_SECONDS = 8
"""A launch's agents end what is left within a few seconds."""


@dataclass(frozen=True)
class HostJob:
    """A `hvdtrain run` on node1; `pid` is its process as seen from outside the hosts."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def pid(self) -> int:
        return child_of(self.process.pid)

    def wait_for(self, name: str, count: int) -> list[dict[str, str]]:
        """What `count` ranks have written to their files `name.RANK`, in the order of ranks."""
        deadline = time.monotonic() + SECONDS
        while len(list(self.folder.glob(f"{name}.?"))) < count:
            assert time.monotonic() < deadline, f"only {list(self.folder.iterdir())}"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        return told_by(self.folder, name, count)

    def end(self) -> tuple[str, str]:
        return self.process.communicate(timeout=SECONDS)


Launch = Callable[..., HostJob]


@pytest.fixture
def launch(hosts: Hosts, tmp_path: Path) -> Iterator[Launch]:
    """launch(*arguments, folder=tmp_path, **environment) -> HostJob: `hvdtrain run` on node1."""
    jobs: list[HostJob] = []

    def begin(*arguments: str, folder: Path = tmp_path, **environment: str) -> HostJob:
        command = [sys.executable, "-m", "hvdtrain.cli", "run", *arguments]
        process = subprocess.Popen(
            hosts["node1"].argv(command, folder),
            env=user_environment(HOME=str(tmp_path), **environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        jobs.append(HostJob(process, folder))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:  # Only a failed test leaves one.
            os.kill(job.pid, signal.SIGKILL)
            job.process.wait()
    assert left(hosts, END_SECONDS) == {}


def told_by(folder: Path, name: str, ranks: int) -> list[dict[str, str]]:
    """What the ranks have written to their files `name.RANK`."""
    return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(ranks)]


def left(hosts: Hosts, seconds: float) -> dict[str, list[str]]:
    """What still runs on each host, after waiting for it to end."""
    found = {name: host.left(seconds) for name, host in hosts.items()}
    return {name: lines for name, lines in found.items() if lines}


def test_hosts_train_to_the_weights_of_local_ranks(
    launch: Launch, controller: str, local_weights: list[np.ndarray]
) -> None:
    job = launch("-H", "node1:2,node2:2", "--controller", controller, *MNIST, "run")
    stdout, stderr = job.end()
    assert job.process.returncode == 0, stderr
    assert "validation accuracy" in stdout
    trained = weights(job.folder / "run")
    for ours, local in zip(trained, local_weights, strict=True):
        np.testing.assert_allclose(ours, local, rtol=0, atol=TOLERANCE)


def test_the_printed_command_starts_the_same_ranks(
    launch: Launch, hosts: Hosts, tmp_path: Path, controller: str
) -> None:
    """By plain horovodrun, which is not what hvdtrain run starts."""
    (tmp_path / "train.py").write_text(
        RANK
        + "import json, pathlib, re, socket\n"
        + "own = re.compile('HOROVOD_(?!GLOO)\\\\w+|OMP_\\\\w+|OMPI_COMM_WORLD_\\\\w+|A')\n"
        + "told = {name: value for name, value in os.environ.items() if own.fullmatch(name)}\n"
        + "told['host'] = socket.gethostname()\n"
        + "pathlib.Path(f'{sys.argv[1]}.{rank}').write_text(json.dumps(told))\n"
    )
    options = ("-H", "node1:1,node2:2", "--controller", controller, "--env", "A=b 'c")
    options += ("--cycle-time-ms", "2", "--start-timeout", "60")
    job = launch(*options, "train.py", "launched")
    assert job.end()[1] == ""
    printed = launch(*options, "--dry-run", "train.py", "pasted").end()[0]
    pasted = subprocess.run(
        hosts["node1"].argv(["/bin/sh", "-c", printed], tmp_path),
        env=user_environment(HOME=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert pasted.returncode == 0, pasted.stderr
    launched = told_by(tmp_path, "launched", 3)
    assert [one["host"] for one in launched] == ["node1", "node2", "node2"]
    assert launched[1]["A"] == "b 'c"
    assert launched == told_by(tmp_path, "pasted", 3)


def test_a_frozen_rank_on_another_host(launch: Launch, tmp_path: Path, controller: str) -> None:
    (tmp_path / "train.py").write_text(hanging.SCRIPT)
    limit = ("--hang-timeout", hanging.LIMIT)
    job = launch(
        *("-H", "node1:1,node2:1", "--controller", controller, *limit, "train.py", "1", "training")
    )
    _, stderr = job.end()
    assert job.process.returncode == hanging.EXIT_HANG, stderr
    hanging.assert_named(stderr, 1, "training", host="node2")


@pytest.mark.parametrize(
    ("controller", "line", "name"), [("mpi", "bin/orted", "orted"), ("gloo", "sh -c cd ", "sh")]
)
def test_what_waits_for_a_rank_on_another_host_is_frozen(
    launch: Launch, hosts: Hosts, tmp_path: Path, controller: str, line: str, name: str
) -> None:
    """mpirun would wait for its daemon for ever, and ssh for the rank's shell."""
    (tmp_path / "train.py").write_text(STAY)
    limit = ("--hang-timeout", hanging.LIMIT)
    job = launch("-H", "node1:1,node2:1", "--controller", controller, *limit, "train.py")
    job.wait_for("environ", 2)
    (frozen,) = (pid for pid, argv in hosts["node2"].processes().items() if line in argv)
    os.kill(frozen, signal.SIGSTOP)
    _, stderr = job.end()
    assert job.process.returncode == hanging.EXIT_HANG, stderr
    assert f"\n{name} on host node2 (process " in stderr
    assert "is stopped (SIGSTOP): by a debugger" in stderr
    assert left(hosts, END_SECONDS) == {}


def test_scripts_on_another_host_have_their_grace(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        RANK
        + """
import signal
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # These hosts see each other's processes.
    time.sleep(3 * rank)
    open(f"saved.{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
with open(f"started.{rank}", "w") as file:
    file.write("{}")
time.sleep(600)
"""
    )
    job = launch("-H", "node2:2", "--controller", "mpi", "train.py")
    job.wait_for("started", 2)
    os.kill(job.pid, signal.SIGTERM)
    job.end()
    assert job.process.returncode == 143
    assert [(tmp_path / f"saved.{rank}").exists() for rank in range(2)] == [True, True]


PROBLEMS = {
    "nobody there": ("node1:1,nowhere:1", (), "host nowhere: it cannot be reached ("),
    "wrong key": ("locked:1,node2:1", (), "host locked: it refuses your ssh key ("),
    "no Python": ("node1:1,bare:1", (), f"host bare: there is no Python at {sys.executable}: "),
    "no such name": ("node1:1,nohost:1", (), "host nohost: its name cannot be resolved ("),
    "wrong interface": (
        "node1:1,node2:1",
        ("--network-interfaces", "ib7"),
        "this host has no network interface ib7: it has eth0\n"
        "host node2 has no network interface ib7: it has eth0\n",
    ),
    "wrong port": ("node1:1,node2:1", ("--ssh-port", "23"), "host node2: no ssh server answers"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_host_that_cannot_run_ranks(
    launch: Launch, hosts: Hosts, tmp_path: Path, controller: str, case: str
) -> None:
    named, options, message = PROBLEMS[case]
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    started = time.monotonic()
    job = launch(
        *("-H", named, "--controller", controller, "--start-timeout", "8", *options, "train.py")
    )
    stdout, stderr = job.end()
    assert time.monotonic() - started < 12
    assert (job.process.returncode, stdout, stderr[: len(message)]) == (1, "", message), stderr
    assert "Traceback" not in stderr
    assert left(hosts, 0) == {}
    assert not (tmp_path / "started").exists()


STAY = (
    RANK
    + """
import json
from hvdtrain.worker.preemption_notice import warned
def tell(name, value):
    with open(f"{name}.part.{rank}", "w") as file:
        json.dump(value, file)
    os.rename(f"{name}.part.{rank}", f"{name}.{rank}")
tell("environ", dict(os.environ))
while not warned():
    time.sleep(0.05)
tell("warned", {})
time.sleep(600)
"""
)


@dataclass
class Sampler:
    """Reads all command lines of all hosts again and again, as `ps` does."""

    seen: set[bytes]
    _end: threading.Event

    def run(self) -> None:
        while not self._end.wait(0.01):
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(entry.read_bytes())
                except OSError:
                    continue


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    one = Sampler(set(), threading.Event())
    thread = threading.Thread(target=one.run)
    thread.start()
    yield one
    one._end.set()
    thread.join()


def test_variables_warning_and_ctrl_c(
    launch: Launch, hosts: Hosts, tmp_path: Path, controller: str, sampler: Sampler
) -> None:
    (tmp_path / "train.py").write_text(STAY)
    job = launch(
        *("-H", "node1:1,node2:1", "--controller", controller, "--all-ranks"),
        *("--env", "WANTED", "--env", "SET=set-6 e", "--env", "WANTED_TOKEN", "train.py"),
        WANTED="wanted-1",
        WANTED_TOKEN="token-2 'é'",
        TF_TOKEN="token-3",
        UNWANTED="unwanted-4",
        UNWANTED_KEY="key-5",
    )
    here, there = job.wait_for("environ", 2)
    for environ in (here, there):
        assert environ["WANTED"] == "wanted-1"
        assert environ["SET"] == "set-6 e"
        assert environ["WANTED_TOKEN"] == "token-2 'é'"
        assert environ["TF_TOKEN"] == "token-3"
    # The launcher's own host has the user's whole environment, other hosts what was asked for.
    assert (here["UNWANTED"], here["UNWANTED_KEY"]) == ("unwanted-4", "key-5")
    assert {"UNWANTED", "UNWANTED_KEY"}.isdisjoint(there)

    os.kill(job.pid, signal.SIGUSR1)
    job.wait_for("warned", 2)
    assert job.process.poll() is None

    os.kill(job.pid, signal.SIGINT)
    _, stderr = job.end()
    assert job.process.returncode in (130, -signal.SIGINT)
    assert left(hosts, END_SECONDS) == {}
    for rank in (0, 1):
        line = f"rank {rank}: received SIGUSR1: this job will end soon\n"
        assert stderr.count(line) == 1
    assert stderr.count("SIGUSR1: this job will end soon; notifying all workers") == 1
    launch_id = here["HVDTRAIN_LAUNCH_ID"]
    assert list(Path("/tmp").glob(f"hvdtrain-brought-*/{launch_id}.*")) == []

    shown = b"\n".join(sampler.seen)
    assert b"hvdtrain.worker" in shown and b"ssh" in shown
    for value in (b"wanted-1", b"token-2", b"token-3", b"unwanted-4", b"key-5"):
        assert value not in shown


SEEN = (
    RANK
    + """
import json
with open(f"seen.{rank}", "w") as file:
    json.dump(os.environ.get("WANTED_TOKEN"), file)
"""
)


@pytest.fixture
def ssh_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's own configuration of ssh."""
    path = next(tmp_path_factory.getbasetemp().glob("hosts*/ssh_config")).with_name("users_config")
    yield path
    path.unlink(missing_ok=True)


def test_secrets_stay_here_unless_the_users_ssh_trusts_the_host(
    launch: Launch, hosts: Hosts, tmp_path: Path, ssh_config: Path, controller: str
) -> None:
    (tmp_path / "train.py").write_text(SEEN)
    known = tmp_path / "known_hosts"

    def run(checking: str) -> tuple[int, str]:
        ssh_config.write_text(
            f"Host node2\n  UserKnownHostsFile {known}\n  StrictHostKeyChecking {checking}\n"
        )
        words = ["-H", "node1:1,node2:1", "--controller", controller, "--env", "WANTED_TOKEN"]
        job = launch(*words, "train.py", WANTED_TOKEN="hush", **{"TF_A;touch injected;B": "1"})
        stderr = job.end()[1]
        return job.process.returncode, stderr

    code, stderr = run("yes")
    assert code == 1 and "host node2: its host key is not in known_hosts" in stderr
    code, stderr = run("ask")  # ssh's own default.
    assert code == 0, stderr
    assert json.loads((tmp_path / "seen.1").read_text()) == "hush"
    (tmp_path / "seen.1").unlink()

    (name, kind, key), *_ = (line.split() for line in known.read_text().splitlines())
    known.write_text(f"{name} {kind} {key[:-8]}{key[-8:].swapcase()}\n")
    for checking in ("ask", "accept-new", "yes", "no"):
        code, stderr = run(checking)
        assert code == 1 and "host node2: its host key has changed" in stderr, stderr
    assert not (tmp_path / "seen.1").exists()
    assert not (tmp_path / "injected").exists()


def test_ranks_of_other_hosts_do_not_outlive_a_killed_launcher(
    launch: Launch, hosts: Hosts, tmp_path: Path, controller: str
) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAY
    (tmp_path / "train.py").write_text(deaf)
    job = launch("-H", "node1:1,node2:1", "--controller", controller, "train.py")
    job.wait_for("environ", 2)
    assert any("hvdtrain.worker" in line for line in hosts["node2"].left())
    os.kill(job.pid, signal.SIGKILL)
    job.end()
    assert left(hosts, END_SECONDS) == {}


def test_ranks_of_other_hosts_do_not_outlive_a_killed_agent(
    launch: Launch, hosts: Hosts, tmp_path: Path, controller: str
) -> None:
    (tmp_path / "train.py").write_text(STAY)
    job = launch("-H", "node1:1,node2:1", "--controller", controller, "train.py")
    job.wait_for("environ", 2)
    agents = [pid for pid, line in hosts["node2"].processes().items() if "start.agent" in line]
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    job.end()
    assert left(hosts, END_SECONDS) == {}


def test_a_host_that_is_cut_off(launch: Launch, hosts: Hosts, tmp_path: Path) -> None:
    """Both sides notice within half a minute: the launches end with an error that names the host,
    and the host's ranks end. Over each controller at the same time, for it takes a while."""
    jobs = []
    for controller in ("mpi", "gloo"):
        folder = tmp_path / controller
        folder.mkdir()
        (folder / "train.py").write_text(STAY)
        options = ("-H", "node1:1,node2:1", "--controller", controller)
        jobs.append(launch(*options, "train.py", folder=folder))
    for job in jobs:
        job.wait_for("environ", 2)
    hosts["node2"].run("ip", "link", "set", "eth0", "down")
    cut = time.monotonic()
    try:
        for job in jobs:
            _, stderr = job.end()
            assert time.monotonic() - cut < 45
            assert job.process.returncode == 1
            assert "the connection to host node2 was lost" in stderr
        while not only_sshd(hosts["node2"]) and time.monotonic() - cut < 45:
            time.sleep(0.1)
        assert only_sshd(hosts["node2"]), hosts["node2"].left()
    finally:
        hosts["node2"].run("ip", "link", "set", "eth0", "up")
        # sshd itself would wait for two hours for the launcher's host.
        for pid in hosts["node2"].processes().keys() - hosts["node2"].quiet:
            with contextlib.suppress(ProcessLookupError):  # Some end with the others.
                os.kill(pid, signal.SIGKILL)


def only_sshd(host: NamespaceHost) -> bool:
    return all(line.startswith("sshd: ") for line in host.left())
