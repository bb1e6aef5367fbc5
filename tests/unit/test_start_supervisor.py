"""Standing by a launcher: its exit code, its end, and a host that is lost."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.start.parts.supervisor import how_lost

REPOSITORY = Path(__file__).parents[2]
# `run` is the launcher; `Told` stands for agents of other hosts, `Lost` for those whose host is cut off.
CODE = """
import os, signal, sys, time
from hvdtrain.signals import listen_for_warnings
from hvdtrain.start.parts import supervisor
from hvdtrain.start.parts.agents import Agents
supervisor.ENDING_SECONDS = 1.0
listen_for_warnings()
class Told(Agents):
    def order_all(self, **order):
        if "warn" in order:
            print("other hosts warned", flush=True)
class Lost(Told):
    def ended(self):
        return {"b": (255, "Connection reset\\n")}
kind = Lost if sys.argv[1].startswith("lost") else Told
# One agent, which tells when its input has ended.
cat = {"b": ["sh", "-c", "cat >/dev/null; date +%s.%N >agent-ended"]} if sys.argv[1] == "hosts" else {}
agents = kind(cat, dict(os.environ))
def run():
    if sys.argv[1] in ("code", "lost ranks"):
        return 7
    if sys.argv[1] == "content":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    if sys.argv[1] == "raises":
        raise ValueError("bad")
    if sys.argv[1] in ("deaf", "lost", "hosts"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("started", signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
    time.sleep(60)
sys.exit(supervisor.supervise(run, "id", agents))
"""


def start(how: str, *before: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", CODE, how],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("how", "code"), [("code", 7), ("killed", 137), ("raises", 1)])
def test_exit_codes(how: str, code: int) -> None:
    with start(how) as process:
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    assert ("ValueError: bad" in stderr) == (how == "raises")
    killed = r"hvdtrain: Horovod's launcher \(process \d+\), which starts .* was killed by SIGKILL"
    assert bool(re.match(killed, stderr)) == (how == "killed")


@pytest.mark.parametrize(("how", "code"), [("sleep", 143), ("content", 143), ("deaf", 137)])
def test_sigterm_is_passed_on_and_its_effect_awaited(how: str, code: int) -> None:
    """After a warning, which neither the launcher nor this process is ended by."""
    with start(how) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started False\n"
        process.send_signal(10)
        time.sleep(0.2)
        assert process.poll() is None
        process.terminate()
        started = time.monotonic()
        stdout, _ = process.communicate(timeout=20)
        assert time.monotonic() - started < 5
    assert (process.returncode, stdout) == (code, "other hosts warned\n")


def test_who_sent_a_signal_is_told_unless_it_is_the_users() -> None:
    """The user's comes from `hvdtrain run`, which starts this program."""
    with start("sleep") as process:
        assert process.stdout is not None
        process.stdout.readline()
        other = subprocess.run(
            ["sh", "-c", f"echo $$; kill -TERM {process.pid}; sleep 1"], stdout=subprocess.PIPE
        )
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 143
    assert stderr == (
        f"hvdtrain: horovodrun (process {process.pid}) was sent SIGTERM by process "
        f"{int(other.stdout)} (sh)\n"
    )
    with start("sleep") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.communicate(timeout=20)[1] == ""


def test_under_nohup_a_hangup_means_nothing() -> None:
    with start("sleep", "nohup") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        time.sleep(1.2)
        assert process.poll() is None
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 143


def test_a_lost_host_ends_the_launch() -> None:
    with start("lost") as process:
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1, "not that of the signal which ended the launcher"
    assert stderr == "hvdtrain: the connection to host b was lost (Connection reset)\n"


@pytest.mark.parametrize(
    ("code", "words", "says"),
    [
        (-9, "", "the connection to host b was lost: the local ssh process that ran its agent was killed by SIGKILL"),
        (255, "noise\nTimeout, b not responding.\n", "the connection to host b was lost (Timeout, b not"),
        (255, "", "the connection to host b was lost, or hvdtrain's agent there was killed"),
        (1, "Traceback\nOSError: no disk\n", "hvdtrain's agent on host b failed (exit code 1): OSError: no disk"),
    ],
)  # fmt: skip
def test_how_a_host_was_lost(code: int, words: str, says: str) -> None:
    assert how_lost("b", code, words).startswith(says)


def test_a_launcher_that_fails_as_a_host_is_lost() -> None:
    """It sees the ranks end there, and may be the first to end."""
    with start("lost ranks") as process:
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert stderr == "hvdtrain: the connection to host b was lost (Connection reset)\n"


def test_other_hosts_do_not_wait_for_a_launcher_that_is_deaf(tmp_path: Path) -> None:
    with start("hosts", cwd=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        asked = time.time()
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 137, "it was killed after a second"
    assert float((tmp_path / "agent-ended").read_text()) - asked < 0.9
