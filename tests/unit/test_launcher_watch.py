"""A rank of an elastic job ends when what started it has gone."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.worker.launcher_watch import ancestors, watch

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),
    "HVDTRAIN_LAUNCH_ID": "one",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
}


def test_ancestors() -> None:
    code = "from hvdtrain.worker.launcher_watch import ancestors; print(*ancestors())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(os.getpid()), str(os.getppid())]
    assert ancestors(os.getpid())[0] == os.getppid()
    assert ancestors(2**22 + 1) == (0, 0)


def test_watch_ends_once_something_changes() -> None:
    values = [1]
    ended = threading.Event()
    thread = watch(lambda: values[0], ended.set, 0.01)
    assert not ended.wait(0.1)
    values[0] = 2
    assert ended.wait(5)
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(("begin", "end"), [("exec ", ""), ("", "; true")])
def test_an_orphan_from_birth_does_not_run(tmp_path: Path, begin: str, end: str) -> None:
    """While it started, its shell was killed, or what was above its shell, as sshd's part ends."""
    (tmp_path / "train.py").write_text("open('ran', 'w').close()\n")
    rank = f"{begin}'{sys.executable}' -P -m hvdtrain.worker train.py{end}"
    rank = f"(sleep 0.5; {rank}) >errors 2>&1 & echo $!"
    done = subprocess.run(
        ["sh", "-c", rank],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    wait_for_end(int(done.stdout))
    assert not (tmp_path / "ran").exists()


def test_an_orphan_ends(tmp_path: Path) -> None:
    """The rank below a shell below a helper: the helper is killed, as sshd's part ends."""
    (tmp_path / "train.py").write_text(
        "import os, time\nopen('ready', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    rank = f"'{sys.executable}' -P -m hvdtrain.worker train.py; true"
    helper = f"import subprocess; subprocess.run(['sh', '-c', {rank!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", helper], cwd=tmp_path, env=ENVIRONMENT, start_new_session=True
    )
    deadline = time.monotonic() + 20
    while not (tmp_path / "ready").exists() or not (tmp_path / "ready").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int((tmp_path / "ready").read_text())
    process.kill()
    process.wait()
    wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 20
    line = Path(f"/proc/{pid}/cmdline")
    try:
        while line.exists() and line.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
