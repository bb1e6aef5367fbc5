"""Run a program that measures, on one process or on all ranks, and read its report.

The program takes `--report FILE` as its last option, into which its rank 0 writes one JSON object: what ranks
print passes through a launcher that cuts long lines and puts tags between.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import EngineError
from hvdtrain.launch.running.bounded import run

TIMEOUT_SECONDS = 400
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    # TensorFlow's noise is not what the reader of a figure looks for.
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
LINES = 15
"""Of each stream, in the message about a failure."""


def run_measurement(argv: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the report of `argv`, run with a thread a rank and with `environment` beside this one's.

    Raises:
        EngineError: it failed, wrote no report, or took longer than TIMEOUT_SECONDS.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        report = Path(folder, "report.json")
        command = [*argv, f"--report={report}"]
        environ = {**os.environ, **ONE_THREAD, **environment}
        done = run(command, limit=TIMEOUT_SECONDS, environ=environ)
        assert done is not None, "this Python has gone"
        if done.returncode is None:
            raise EngineError(
                f"The measurement took longer than {TIMEOUT_SECONDS} s: {' '.join(command)}"
            )
        if done.returncode or not report.exists():
            last = [*done.stdout.splitlines()[-LINES:], *done.stderr.splitlines()[-LINES:]]
            raise EngineError(
                f"The measurement failed (exit code {done.returncode}): {' '.join(command)}\n"
                + "\n".join(last)
            )
        return dict(json.loads(report.read_text()))
