"""Start-up: from the command to the first line of rank 0, `hvdtrain run` against bare horovodrun.

The two are timed one after the other in each pass, for the machine's speed drifts; the medians of
the passes count. The script imports nothing: what is timed is the launchers' own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import EngineError

LINE = "the first line"
SCRIPT = f"print('{LINE}', flush=True)\n"


@dataclass(frozen=True)
class StartPass:
    """Seconds to the first line in one pass."""

    ours: float
    bare: float


def median(passes: Sequence[StartPass]) -> StartPass:
    """Of each of the two, over the passes."""
    return StartPass(
        statistics.median(one.ours for one in passes), statistics.median(one.bare for one in passes)
    )


def measure_startup(np: int, controller: str, passes: int) -> Iterator[StartPass]:
    """Yield `passes` pairs of timings of `np` ranks on this machine. Raises EngineError."""
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        script = Path(folder) / "first_line.py"
        script.write_text(SCRIPT)
        options = ["-np", str(np)]
        ours = [
            *(
                sys.executable,
                "-P",
                "-m",
                "hvdtrain.cli",
                "run",
                *options,
                "--controller",
                controller,
            ),
            *("--log-dir", f"{folder}/logs", str(script)),
        ]
        bare = [
            *(str(programs / "horovodrun"), *options, f"--{controller}"),
            *(sys.executable, str(script)),
        ]
        for _ in range(passes):
            yield StartPass(seconds_to_line(ours, environment), seconds_to_line(bare, environment))


def seconds_to_line(argv: Sequence[str], environment: Mapping[str, str]) -> float:
    """Seconds until the command prints LINE; waits for its end. Raises EngineError if it fails."""
    started = time.perf_counter()
    with subprocess.Popen(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        said = ""
        found = 0.0
        for line in process.stdout:
            said += line
            if LINE in line and not found:
                found = time.perf_counter() - started
    if not found or process.returncode:
        raise EngineError(
            f"the launch failed (exit code {process.returncode}): {' '.join(argv)}\n{said}"
        )
    return found
