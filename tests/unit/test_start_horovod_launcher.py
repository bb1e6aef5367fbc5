"""What is told to Horovod's launcher in place of its questions."""

import argparse
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.environment import TERMINAL
from hvdtrain.errors import exit_code_of
from hvdtrain.start.parts import horovod_launcher
from hvdtrain.start.parts.horovod_launcher import code_in, in_command_line, launch_ranks

REPOSITORY = Path(__file__).parents[2]


def test_a_variable_that_is_asked_for_must_be_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVDTRAIN_FORWARD", "PATH,NO_KEY")
    assert exit_code_of(lambda: launch_ranks(["--help"])) == 2
    said = "hvdtrain: --env NO_KEY: not set in this environment: set it first\n"
    assert capsys.readouterr().err == said


def test_without_ssh_other_hosts_are_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "")
    monkeypatch.setattr(horovod_launcher, "_remote_hosts", lambda parsed: ["a", "b"])
    monkeypatch.setenv("HVDTRAIN_LAUNCH_ID", "x")
    assert exit_code_of(lambda: launch_ranks(["-np", "2", "-H", "a:1,b:1", "python"])) == 1
    assert capfd.readouterr().err.startswith(
        "hvdtrain: ssh, which reaches the other hosts, is not in"
    )


def test_an_agent_that_cannot_be_started_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_process_is_left(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(horovod_launcher, "_remote_hosts", lambda parsed: ["a"])
    monkeypatch.setattr(subprocess, "Popen", no_process_is_left)
    monkeypatch.setenv("HVDTRAIN_LAUNCH_ID", "x")
    assert exit_code_of(lambda: launch_ranks(["-np", "1", "-H", "a:1", "python"])) == 127
    said = "hvdtrain: cannot start ssh: Resource temporarily unavailable\n"
    assert capfd.readouterr().err == said


def test_the_exit_code_of_the_rank_that_ended_first() -> None:
    text = "Horovod detected\nProcess name: 1\nExit code: {}\n"
    assert code_in(RuntimeError(text.format(7))) == 7
    assert code_in(RuntimeError(text.format(256))) == 1
    assert code_in(RuntimeError("something else")) == 1


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_what_goes_by_the_ranks_command(controller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over Gloo values stand there, over MPI names: of what must be there when the rank's interpreter starts, and of
    Horovod's options."""
    names = ["PATH", "WANTED", "WANTED_KEY", "TF_TOKEN", "UNWANTED", "OLDPWD", "TF_A;touch x;B"]
    names += [
        "CUDA_VISIBLE_DEVICES",
        "NCCL_DEBUG",
        "PYTHONHASHSEED",
        "TF_WANTED",
        "HOROVOD_CYCLE_TIME",
    ]
    names += ["NCCL_SOCKET_IFNAME"]
    for name in names:
        monkeypatch.setitem(os.environ, name, "1x")
    arguments = argparse.Namespace(use_gloo=controller == "gloo")
    asked = {"WANTED", "WANTED_KEY", "TF_WANTED", "PYTHONHASHSEED", "TF_A;touch x;B"}
    shown = [name for name in names if in_command_line(arguments, asked, name)]
    assert sorted(shown) == [
        *("HOROVOD_CYCLE_TIME", "NCCL_SOCKET_IFNAME", "PATH", "PYTHONHASHSEED")
    ]
    brought = set(names) & horovod_launcher._brought(arguments, asked).keys()
    assert brought == {"WANTED", "WANTED_KEY", "TF_TOKEN", "TF_WANTED", "NCCL_DEBUG"}


def test_ranks_of_this_host_inherit_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command has room for 128 kB, an environment for megabytes. What Horovod's options set has no other way."""
    monkeypatch.setitem(os.environ, "TF_LONG", "x" * 2**17)
    monkeypatch.setitem(os.environ, "HOROVOD_CYCLE_TIME", "1")
    monkeypatch.delitem(os.environ, "PYTHONUNBUFFERED", raising=False)
    names = ["TF_LONG", "PATH", "HOROVOD_CYCLE_TIME", "PYTHONUNBUFFERED"]
    gloo = argparse.Namespace(use_gloo=True)
    shown = [name for name in names if in_command_line(gloo, set(), name, one_host=True)]
    assert shown == ["HOROVOD_CYCLE_TIME", "PYTHONUNBUFFERED"]


# In a process of its own, for Horovod's modules are changed there.
REPLACED = """
import argparse, json, os, sys
from hvdtrain.start.parts import horovod_patches
from hvdtrain.start.parts.horovod_patches import *
from horovod.runner import gloo_run, launch
from horovod.runner.common.util import env, safe_shell_exec
from horovod.runner.util.remote import get_remote_command
replace_functions(argparse.Namespace(nics={"lo"}), {"A"}.__contains__, True)
"""


def replaced(code: str, **environ: str) -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", REPLACED + code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_horovod_is_told() -> None:
    told = json.loads(
        replaced("""
server = gloo_run.RendezvousServer(0)
print(json.dumps({
    "shown": [name for name in "AB" if env.is_exportable(name)],
    "listens": [server.start() > 0, server._httpd.server_address[0]],
    "heavy": sorted({"tensorflow", "setuptools"} & set(sys.modules)),
}))
""")
    )
    assert told == {
        "shown": ["A"],
        "listens": [True, "127.0.0.1"],
        "heavy": [],
    }


def test_horovods_process_for_a_rank_loads_no_launcher() -> None:
    """It is a new Python that loads the module of its class before it starts the rank: 0.1 s of each launch."""
    module = replaced(
        "print(safe_shell_exec.multiprocessing.get_context('spawn').Process.__module__)"
    )
    loaded = f"import sys, {module.decode()}; print([m for m in sys.modules if 'horovod' in m])"
    done = subprocess.run([sys.executable, "-c", loaded.replace("\n", "")], capture_output=True)
    assert (done.stdout, done.stderr) == (b"[]\n", b"")


@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_a_machine_without_ssh_and_a_home_folder_to_write_in(
    controller: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-P", "-m", "hvdtrain.start.run_horovod", controller]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Nor need there be an ssh, as in many a container.
    for name in ("sh", "bash", "env", "echo"):
        program = shutil.which(name)
        assert program
        (tmp_path / name).symlink_to(program)
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [*command, "-np", "1", "-H", "localhost:1", "echo", "here"], cwd=tmp_path,
        env={**os.environ, **as_root, "PATH": scripts, "HOME": "/proc/none"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "here" in done.stdout


SETTLED = """
def settled(*words, built):
    sys.argv = ["horovodrun", *words, "true"]
    found = launch.parse_args()
    settle(found, built)
    return [found.hosts, found.use_gloo]
open("hosts", "w").write("a slots=2\\nb slots=1")
both = {"mpi", "gloo"}
print(json.dumps([
    settled("-np", "2", built=both),
    settled("-np", "2", built={"gloo"}),
    settled("-np", "2", "--gloo", "-H", "a:2", built=both),
    settled("-np", "2", "--mpi", "-hostfile", "hosts", built=both),
]))
"""


def test_what_is_left_open_is_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert json.loads(replaced(SETTLED)) == [
        ["localhost:2", False],
        ["localhost:2", True],
        ["a:2", True],
        ["a:2,b:1", False],
    ]
    code = "try: settled('-np', '2', '--mpi', built={'gloo'})\nexcept EngineError as e: print(e)"
    said = replaced(f"{SETTLED}\nfrom hvdtrain.errors import EngineError\n{code}").decode()
    assert "Horovod was built without mpi: hvdtrain install-horovod" in said


def test_horovods_ssh_follows_the_users_configuration(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "stricthostkeychecking $CHECKING"\n')
    ssh.chmod(0o755)
    code = "print(get_remote_command(\"'a b'\", 'node1', 2222, '/my key'), end='')"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    unsure = replaced(code, PATH=path, CHECKING="ask").decode()
    assert unsure.startswith("ssh -o BatchMode=yes ")
    assert " -o StrictHostKeyChecking=accept-new " in unsure
    assert " -p 2222 -i '/my key' node1 'exec sh -c " in unsure
    for set_by_user in ("true", "accept-new"):
        assert "StrictHostKey" not in replaced(code, PATH=path, CHECKING=set_by_user).decode()


BROKE = "hvdtrain: the connection to host node2 was lost"
KILLED = "was killed by SIGKILL (out of memory?)"


@pytest.mark.parametrize(
    ("rank", "connection", "code", "says"),
    [
        ("exit 3", "", 3, ""),
        ("exit 255", "", 255, ""),
        ("kill -KILL $$", "", 137, ""),
        ("kill -TERM $$", "", 143, ""),
        ("", "kill -KILL $$", 1, f"{BROKE}: the local ssh process that ran rank 1 {KILLED}\n"),
        ("", "exit 255", 1, f"{BROKE}\n"),
    ],
)  # fmt: skip
def test_the_end_of_a_connection_is_not_that_of_the_rank(
    tmp_path: Path, rank: str, connection: str, code: int, says: str
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\n[ "$1" != -G ] || exit\n{connection}\nfor line; do :; done\nsh -c "$line"\n'
    )
    ssh.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    run = f"""
import shlex
command = get_remote_command(shlex.quote("sh -c " + shlex.quote({rank!r})), "node2")
code = safe_shell_exec.execute(command, index=1, events=[])
print(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", REPLACED + run],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PATH": path},
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("[1]<")]
    assert (done.stdout, "".join(said)) == (f"{code}\n", says), done.stderr


def test_any_bytes_of_a_rank_come_through() -> None:
    """A strict decoder would raise at a character that is cut, and the output would stop there."""
    code = """
raise SystemExit(safe_shell_exec.execute(r"printf 'a\\377b\\nc\\303'", index=0))
"""
    assert replaced(code) == b"[0]<stdout>:a\xffb\n[0]<stdout>:c\xc3\n"


def test_a_worker_that_takes_anothers_place_begins_a_line() -> None:
    """In an elastic job, where both write to the same place."""
    code = """
from hvdtrain.start.parts.output_tags import CurrentRank
for write in ("printf abc", "printf ''", "echo d"):
    safe_shell_exec.execute(write, index=CurrentRank(1, lambda: 0))
"""
    frames = (b"abc", b"\x1e", b"d\x1e")
    wanted = b"".join(b"[0]<stdout>:\x10b%s\n" % frame for frame in frames)
    assert replaced(code, **{TERMINAL: "0"}) == wanted


def test_what_every_helper_of_gloo_loads_is_light() -> None:
    """Each rank over Gloo has a helper process, which loads the program that started it."""
    code = "import sys, hvdtrain.start.run_horovod; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name for name in done.stdout.split() if name.startswith(("hvdtrain", "horovod"))}
    own = {"hvdtrain.start", "hvdtrain.start.run_horovod"}
    assert loaded == {"hvdtrain", "hvdtrain.environment", "hvdtrain.signals", *own}


SIGNALLED = """
import os, signal
from hvdtrain.start.parts.horovod_patches import gloo_run, noted_signals
came = noted_signals()
event = gloo_run.register_shutdown_event()
os.kill(os.getpid(), signal.SIGTERM)
print(event.is_set(), came)
"""


def test_a_signal_that_ends_horovods_launcher_is_noted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True [15]\n", done.stderr
