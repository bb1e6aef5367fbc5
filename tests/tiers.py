"""Run the tests tier by tier, and end with one line for all of them: `python tests/tiers.py [--all]`.

Files of tests run beside each other. Tests on ranks and on clusters wait as long as they compute: three and two run at
a time, on clusters each with hosts and a Slurm of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# One process more than cores, as some wait; at most four, as each that imports TensorFlow takes 0.6 GB.
PROCESSES = str(min((os.cpu_count() or 1) + 1, 4))
UNIT = ["tests/unit", "-n", PROCESSES, "--dist", "loadfile"]
# Each with ranks of its own, up to 5 GB of them.
RANKS = ["tests/ranks", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
CLUSTER = ["tests/cluster", "-n", "2", "--dist", "loadfile"]
TIERS = ([*UNIT, "-m", "not slow"], [*RANKS, "-m", "not slow"])
ALL_TIERS = (UNIT, RANKS, CLUSTER)
NO_TESTS = 5
"""Of pytest: nothing was collected, which is no failure of a tier."""
LONGEST = 1500
"""Characters at the end of a failure's report that are shown again after all tiers."""


def run(arguments: list[str], report: Path) -> tuple[Counter[str], dict[str, str]]:
    """Run one tier; return how many tests passed, failed and were skipped, and the name and report of each failure."""
    command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    counted, failed = read(report) if report.exists() else (Counter(), {})
    if status not in (0, NO_TESTS) and not failed:
        # It broke off: a usage error, a crash, Ctrl-C.
        counted["failed"] += 1
        failed = {f"pytest {' '.join(arguments)}": f"exit code {status}"}
    return counted, failed


def read(report: Path) -> tuple[Counter[str], dict[str, str]]:
    """Return the same of pytest's report in JUnit's format."""
    counted: Counter[str] = Counter()
    failed: dict[str, str] = {}
    for case in xml.parse(report).iter("testcase"):
        kinds = {child.tag: child.text or "" for child in case}
        if bad := kinds.keys() & {"failure", "error"}:
            # Once, also if both the test and what cleans up after it failed.
            text = kinds["failure" if "failure" in bad else "error"]
            failed.setdefault(f"{case.get('classname')}::{case.get('name')}", text)
        else:
            counted["skipped" if "skipped" in kinds else "passed"] += 1
    counted["failed"] = len(failed)
    return counted, failed


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--all"]):
        print("usage: python tests/tiers.py [--all]", file=sys.stderr)
        return 2
    start = time.monotonic()
    total: Counter[str] = Counter()
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, tier in enumerate(ALL_TIERS if arguments else TIERS):
            counted, reports = run(tier, Path(folder) / f"{number}.xml")
            total += counted
            failed |= reports
    print()
    for name, text in failed.items():
        print(f"FAILED {name}: {text[-LONGEST:]}")
    kinds = [f"{total[kind]} {kind}" for kind in ("failed", "passed", "skipped")]
    print(f"{', '.join(kinds)} in {time.monotonic() - start:.0f}s")
    return 1 if failed or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
