"""Times start-up, from the command to the first line of rank 0: `hvdtrain run` against plain horovodrun.

The script imports nothing, so only the launchers are timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.bench.measurement import Comparison
from hvdtrain.errors import EngineError
from hvdtrain.launch.running.processes import start

LINE = "the first line"
SCRIPT = f"print('{LINE}', flush=True)\n"


def measure_startup(np: int, controller: str, passes: int) -> Iterator[Comparison]:
    """Yield the seconds to the first line with horovodrun and with `hvdtrain run`, for each pass.

    Raises:
        EngineError: If a launch failed.
    """
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        script = Path(folder) / "first_line.py"
        script.write_text(SCRIPT)
        bare = [str(programs / "horovodrun"), "-np", str(np), f"--{controller}"]
        bare += [sys.executable, str(script)]
        hvdtrain = [sys.executable, "-P", "-m", "hvdtrain.cli"]
        options = ["-np", str(np), "--controller", controller, "--log-dir", f"{folder}/logs"]
        ours = [*hvdtrain, "run", *options, str(script)]
        for _ in range(passes):
            measured = seconds_to_line(ours, environment)
            yield Comparison(seconds_to_line(bare, environment), measured)


def seconds_to_line(argv: Sequence[str], environment: Mapping[str, str]) -> float:
    """Run a command to its end; return the seconds until it prints LINE.

    Raises:
        EngineError: If it fails, or does not print LINE.
    """
    started = time.perf_counter()
    with start(argv, environment, stdin=subprocess.DEVNULL, merge=True) as process:
        assert process.stdout is not None
        said = ""
        found = 0.0
        for data in process.stdout:
            line = data.decode(errors="replace")
            said += line
            if LINE in line and not found:
                found = time.perf_counter() - started
    if not found or process.returncode:
        raise EngineError(
            f"the launch failed (exit code {process.returncode}): {' '.join(argv)}\n{said}"
        )
    return found
