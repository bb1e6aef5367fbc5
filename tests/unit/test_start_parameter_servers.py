"""A chief, workers and servers on this machine: each finds the others, and however it ends, nothing is left.

Workers and servers are stand-ins without TensorFlow, which listen at their ports.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.running.processes import Pipes, processes_of
from hvdtrain.start.parts import parameter_server_launcher
from hvdtrain.start.parts.host_processes import STOPPED, HostProcesses

REPOSITORY = Path(__file__).parents[2]
SECONDS = 60
# In the place of hvdtrain.start.tf_server. With a file `broken.NAME` it fails.
STAND_IN = """
import sys
if sys.orig_argv[1:4] == ["-P", "-m", "hvdtrain.start.tf_server"]:
    import json, os, socket, time
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    name = f"{task['type']}-{task['index']}"
    address = config["cluster"][task["type"]][task["index"]]
    if os.path.exists(f"broken.{name}"):
        os.write(2, f"{name} has no memory\\n".encode())
        os._exit(1)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", int(address.rpartition(":")[2])))
    listener.listen()
    with open(f"part.{os.getpid()}", "w") as file:
        json.dump({"pid": os.getpid(), "address": address, "environ": dict(os.environ)}, file)
    os.rename(f"part.{os.getpid()}", f"{name}.{os.getpid()}")
    print(name, "serves", flush=True)
    time.sleep(600)
"""
CHIEF = """
import json, os, signal, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
def born(name, count=1):
    "What processes of this name have said, in the order of their birth."
    while len(found := list(Path().glob(f"{name}.*[0-9]"))) < count:
        time.sleep(0.02)
    return [json.loads(one.read_text()) for one in sorted(found, key=os.path.getmtime)]
everybody = [born(f"{kind}-{i}")[0] for kind in ("worker", "ps") for i in range(len(config["cluster"][kind]))]
Path("all.ready").touch()
"""
FOR_EVER = CHIEF + "time.sleep(600)\n"


@dataclass(frozen=True)
class Run:
    """A running `hvdtrain run --strategy parameter-server`."""

    process: subprocess.Popen[str]
    folder: Path

    def wait(self) -> None:
        """Until all processes are there."""
        deadline = time.monotonic() + SECONDS
        while not (self.folder / "all.ready").exists():
            assert time.monotonic() < deadline, list(self.folder.iterdir())
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, stdout, stderr.removeprefix("\n")

    def born(self, name: str) -> dict[str, str]:
        return json.loads(next(self.folder.glob(f"{name}.*[0-9]")).read_text())

    def left(self, seconds: float = 0) -> list[str]:
        """Command lines of what still runs in the folder."""
        deadline = time.monotonic() + seconds
        while True:
            found = []
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    if (entry / "cwd").readlink() == self.folder:
                        found.append((entry / "cmdline").read_text().replace("\0", " "))
                except OSError:
                    continue
            if not any(found) or time.monotonic() > deadline:
                return list(filter(None, found))
            time.sleep(0.05)


Begin = Callable[..., Run]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """begin(script, *options, **environment) -> Run, of two workers and two servers."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    folder = tmp_path / "work"
    folder.mkdir()
    runs: list[Run] = []

    def start(script: str, *options: str, **environment: str) -> Run:
        (folder / "train.py").write_text(script)
        numbers = ["--strategy", "parameter-server", "--workers", "2", "--ps", "2"]
        process = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain.cli", "run", *numbers, *options, "train.py"],
            cwd=folder,
            env={
                **{name: value for name, value in os.environ.items() if name[:3] != "TF_"},
                "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{REPOSITORY}",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        runs.append(Run(process, folder))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:  # Only a failed test leaves one; its guard ends the others.
            run.process.kill()
            run.process.communicate()
        assert run.left(SECONDS) == []


def test_each_finds_the_others_and_ends_with_the_chief(begin: Begin) -> None:
    script = CHIEF + (
        "import socket\n"
        "for one in everybody:\n"
        "    host, _, port = one['address'].rpartition(':')\n"
        "    socket.create_connection((host, int(port))).close()\n"
        "print('reached', len(everybody), sys.argv, os.environ['HVDTRAIN_STRATEGY'], flush=True)\n"
        "sys.exit(7)\n"
    )
    cluster = {"HOROVOD_RANK": "3", "OMPI_COMM_WORLD_RANK": "3", "HVDTRAIN_RANK_CORES": ""}
    run = begin(script, "--log-dir", "logs", "--env", "API_KEY=sesame", **cluster)
    code, stdout, stderr = run.end()
    assert (code, stdout) == (7, "reached 4 ['train.py'] parameter-server\n"), stderr
    assert stderr == "chief ended with exit code 7\nlogs: logs\n"
    assert run.left() == []
    logs = {path.parent.name: path.read_text() for path in run.folder.glob("logs/*/stdout")}
    assert logs == {
        "chief": stdout,
        **{name: f"{name} serves\n" for name in ("worker-0", "worker-1", "ps-0", "ps-1")},
    }
    told = run.born("ps-1")["environ"]
    assert not {"HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"} & told.keys()  # type: ignore[attr-defined]
    assert told["API_KEY"] == "sesame"
    assert json.loads(told["TF_CONFIG"])["task"] == {"type": "ps", "index": 1}
    cores = len(os.sched_getaffinity(0))
    assert told["TF_NUM_INTRAOP_THREADS"] == told["OMP_NUM_THREADS"] == str(max(1, cores // 5))


@pytest.mark.slow
def test_a_worker_that_dies_is_started_again_at_its_port(begin: Begin) -> None:
    script = CHIEF + (
        "first = born('worker-1')[0]\n"
        "os.kill(first['pid'], signal.SIGKILL)\n"
        "_, second = born('worker-1', 2)\n"
        "os.kill(second['pid'], signal.SIGTERM)\n"
        "third = born('worker-1', 3)[2]\n"
        "print(len({one['address'] for one in (first, second, third)}))\n"
    )
    run = begin(script)
    code, stdout, stderr = run.end()
    assert (code, stdout) == (0, "1\n"), stderr
    assert stderr == (
        "worker-1 was killed by SIGKILL (out of memory?): restarting it (1 of 10)\nworker-1 was "
        "killed by SIGTERM: restarting it (2 of 10)\n"
    )
    assert run.left() == []


def test_without_a_server_the_run_ends_with_one_message(begin: Begin) -> None:
    run = begin(CHIEF + "time.sleep(1)\nraise OSError('Socket closed')\n", "--log-dir", "logs")
    run.wait()
    os.kill(int(run.born("ps-0")["pid"]), signal.SIGKILL)
    killed = time.monotonic()
    code, stdout, stderr = run.end()
    assert time.monotonic() - killed < 5
    assert (code, stdout) == (1, "")
    assert stderr == (
        "ps-0 was killed by SIGKILL (out of memory?): the variables that it held are lost, so "
        "the run ends; what was saved before is kept\nlogs: logs\n"
    )
    assert run.left() == []


def test_a_server_that_does_not_start(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "work" / "broken.ps-1").touch()
    run = begin("raise OSError('Socket closed')\n")
    code, stdout, stderr = run.end()
    first, second, *_ = filter(None, stderr.splitlines())
    assert (code, stdout, first) == (1, "", "[ps-1] ps-1 has no memory")
    assert second.startswith("ps-1 ended with exit code 1: the variables that it held are lost")


@pytest.mark.slow
def test_the_chiefs_own_failure_is_told_with_its_traceback(begin: Begin) -> None:
    run = begin(CHIEF + "raise ValueError('no data')\n", "--log-dir", "logs")
    code, _, stderr = run.end()
    assert code == 1
    assert stderr.startswith("chief failed:\nTraceback ")
    assert stderr.endswith("\nValueError: no data\nlogs: logs\n")
    assert run.left() == []


@pytest.mark.slow
def test_a_chief_that_is_killed(begin: Begin) -> None:
    run = begin(CHIEF + "os.kill(os.getpid(), signal.SIGKILL)\n", "--log-dir", "logs")
    code, _, stderr = run.end()
    assert (code, stderr) == (137, "chief was killed by SIGKILL (out of memory?)\nlogs: logs\n")


def test_a_stopped_process_is_ended() -> None:
    ended: list[object] = []
    processes = HostProcesses(Pipes(), lambda **news: ended.append(news["ended"]), still=0.3)
    for number in range(2):
        processes.start(number, ["sleep", "60"], os.environ)
    os.kill(processes._running[1].popen.pid, signal.SIGSTOP)
    deadline = time.monotonic() + SECONDS
    while not ended:
        assert time.monotonic() < deadline
        processes.tick()
        time.sleep(0.01)
    processes.end()
    assert ended == [[1, STOPPED]]


def test_ctrl_c_ends_all(begin: Begin) -> None:
    run = begin(FOR_EVER)
    run.wait()
    asked = time.monotonic()
    os.kill(run.process.pid, signal.SIGINT)
    code, stdout, stderr = run.end()
    assert time.monotonic() - asked < 5
    assert (code, stdout, stderr) == (
        130,
        "",
        "SIGINT: stopping the run (repeat to stop at once)\n",
    )
    assert run.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_chief_saves_before_its_servers_end(begin: Begin, number: signal.Signals) -> None:
    script = CHIEF + (
        "import socket\n"
        "def save(*_):\n"
        "    print('saving', flush=True)\n"
        "    time.sleep(0.5)\n"
        "    for one in everybody:\n"
        "        host, _, port = one['address'].rpartition(':')\n"
        "        socket.create_connection((host, int(port))).close()\n"
        "    print('saved', flush=True)\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "try:\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    save()\n"
    )
    run = begin(script)
    run.wait()
    time.sleep(0.2)  # For the handlers.
    os.kill(run.process.pid, number)
    code, stdout, stderr = run.end()
    assert (code, stdout) == (128 + number, "saving\nsaved\n"), stderr
    assert run.left() == []


def test_a_warning_reaches_the_chief_alone(begin: Begin) -> None:
    from_worker = "from hvdtrain.worker.preemption_notice import warned\n"
    run = begin(
        FOR_EVER.replace("time.sleep(600)", f"{from_worker}while not warned(): time.sleep(0.05)")
    )
    run.wait()
    os.kill(run.process.pid, signal.SIGUSR1)
    code, _, stderr = run.end()
    assert code == 0
    assert "rank 0: received SIGUSR1" in stderr
    assert "restarting it" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["hvdtrain.cli", "parameter_servers", "hvdtrain.start.agent"])
def test_sigkill_of_whom_it_depends_on_leaves_nothing(begin: Begin, victim: str) -> None:
    run = begin(FOR_EVER)
    run.wait()
    if victim == "hvdtrain.cli":
        run.process.kill()
    else:
        (launch_id,) = {
            run.born(name)["environ"]["HVDTRAIN_LAUNCH_ID"] for name in ("ps-0", "ps-1")
        }  # type: ignore[index]
        for pid in processes_of(launch_id):
            with contextlib.suppress(OSError):  # Some end by themselves.
                if victim in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
    run.process.communicate(timeout=SECONDS)
    assert run.process.returncode != 0
    assert run.left(8) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_the_printed_command_alone(begin: Begin, tmp_path: Path, number: int, code: int) -> None:
    """Pasted into a shell it ends as cleanly: nobody else looks after its processes."""
    run = begin(FOR_EVER, "--dry-run")
    command = shlex.split(run.end()[1])
    assert command[1:4] == ["-P", "-m", "hvdtrain.start.run_parameter_servers"]
    path = f"{tmp_path / 'site'}{os.pathsep}{REPOSITORY}"
    process = subprocess.Popen(
        command,
        cwd=run.folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    alone = Run(process, run.folder)
    alone.wait()
    asked = time.monotonic()
    os.kill(process.pid, number)
    assert alone.end()[0] == code
    assert alone.left(5) == []
    assert time.monotonic() - asked < 5


def test_an_ignored_hangup_stays_ignored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        received = parameter_server_launcher._record_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_variable_that_is_asked_for_must_be_set() -> None:
    words = ["--workers", "1", "--ps", "1", "--env", "PATH", "--env", "NO_KEY", "--", "python"]
    with pytest.raises(UsageError, match="--env NO_KEY: not set in this environment"):
        parameter_server_launcher._options(words)


def test_without_ssh_other_hosts_are_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is started here."""
    words = ["--workers", "1", "--ps", "1", "--hosts", "192.0.2.1:1,192.0.2.2:1", "--", "python"]
    monkeypatch.setattr(parameter_server_launcher, "_record_signals", list)
    monkeypatch.setattr(parameter_server_launcher, "Agents", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HVDTRAIN_LAUNCH_ID", "x")
    with pytest.raises(HvdtrainError, match="ssh, which reaches the other hosts"):
        parameter_server_launcher.launch_roles(words)
