"""A rank is warned by SIGUSR1, and lives."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run_script(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-P", "-m", "hvdtrain.worker", "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HOROVOD_RANK": "3"},
        capture_output=True,
        text=True,
    )


def test_a_rank_says_so_and_remembers(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        "import os, signal\nfrom hvdtrain.worker.preemption_notice import warned\nprint(warned())\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nprint(warned())\n",
    )
    assert (done.returncode, done.stdout) == (0, "False\nTrue\n")
    assert done.stderr == "rank 3: received SIGUSR1: this job will end soon\n"


def test_a_script_may_listen_itself(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('mine'))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")
