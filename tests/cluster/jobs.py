"""Start small scripts with `hvdtrain run`, as a user does, and look for what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SECONDS = 120
# Scripts that need no TensorFlow ask their launcher for their rank.
RANK = (
    "import os, sys, time\n"
    "rank = int(os.environ.get('HOROVOD_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK', 0))\n"
)


def user_environment(**changes: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    return {**kept, "PATH": path, "PYTHONPATH": str(REPOSITORY), **changes}


@dataclass(frozen=True)
class Job:
    """A running `hvdtrain run` whose processes carry `mark` in their environment."""

    process: subprocess.Popen[str]
    mark: str
    folder: Path

    def wait_for(self, name: str, count: int) -> None:
        """Wait until `count` ranks have made their file `name.RANK`."""
        deadline = time.monotonic() + SECONDS
        while len(list(self.folder.glob(f"{name}.*"))) < count:
            assert time.monotonic() < deadline, "the ranks did not start"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def log(self, rank: int, stream: str) -> str:
        """What a rank wrote, in its log folder."""
        (path,) = self.folder.glob(f".hvdtrain/logs/*/rank.{rank}/{stream}")
        return path.read_text(errors="replace")

    def left(self) -> list[str]:
        """The command lines of all processes of the job that still exist."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found
