"""Warning the ranks of a launch: each once, and none before it is prepared."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from hvdtrain.launch.running.process import parse_status
from hvdtrain.launch.running.ranks import Warner, ranks_of, topmost

RANK = """
import os, signal, subprocess, sys, time
def note(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write("warned ")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1] + ".ready", "w").close()
while not os.path.exists(sys.argv[1] + ".go"):
    time.sleep(0.02)
signal.signal(signal.SIGUSR1, note)
while not os.path.exists(sys.argv[1] + ".end"):
    time.sleep(0.02)
child.kill()
sys.exit(child.wait() != -9)
"""


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_status() -> None:
    text = (
        "Name:\tx:y\nPPid:\t7\nSigBlk:\t0000000000000001\nSigIgn:\t2\nSigCgt:\t0000000000004200\n"
    )
    state = parse_status(text)
    assert (state.parent, state.caught) == (7, {10, 15})


def test_topmost() -> None:
    assert topmost({10: 1, 11: 10, 12: 11, 20: 2}) == {10, 20}


def test_a_warning_waits_for_the_rank_and_spares_its_children(tmp_path: Path) -> None:
    mark, note = uuid.uuid4().hex, tmp_path / "note"
    environment = {**os.environ, "HVDTRAIN_LAUNCH_ID": mark, "HOROVOD_RANK": "0"}
    with subprocess.Popen([sys.executable, "-c", RANK, str(note)], env=environment) as rank:
        wait_until(Path(f"{note}.ready").exists)
        warner = Warner(mark)
        warner.tick()
        warner.warn()
        warner.tick()
        assert set(ranks_of(mark)) == {rank.pid}
        Path(f"{note}.go").touch()
        wait_until(lambda: signal.SIGUSR1 in ranks_of(mark)[rank.pid].caught)
        for _ in range(3):
            warner.tick()
        wait_until(lambda: note.exists() and note.read_text() == "warned ")
        warner.warn()
        warner.tick()
        wait_until(lambda: note.read_text() == "warned warned ")
        Path(f"{note}.end").touch()
        assert rank.wait(20) == 0
