"""Do the tests find what a careless change breaks? Plant one fault at a time, and see the test that should fail.

    python tests/planted_faults.py                   all faults
    python tests/planted_faults.py NAME...           some of them
    python tests/planted_faults.py --jobs 2          two at a time, each in a copy of its own

The faults stand in tests/faults/*.toml: a name, a file, a piece of its text that occurs there once, what to put in
its place, and the test that finds it: the cheapest one. They are planted in copies of the files that git knows, as
they are now; this tree stays as it is. A line for each fault:

    found              the test passes without the fault and fails with it
    NOT FOUND          it passes with the fault, or says something else than passed or failed; the line says what
    no longer applies  the text is not in the file once: the code has changed, adapt the fault

The exit code is 0 if all are found. Tests on real ranks take most of the time; `pytest` must be able to run them here.

Whoever moves or rewrites code adapts its faults; whoever merges or drops tests runs this before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults")
LIMIT_SECONDS = 900
"""For one run of pytest. Horovod's stall check ends a job whose ranks wait for each other long before."""
ENDING_SECONDS = 20
"""For pytest to end what its tests have started."""
PASSED, FAILED = 0, 1
"""pytest's exit codes; the others are about collecting, usage and pytest itself."""


@dataclass(frozen=True)
class Fault:
    """One or two lines that a careless change might write.

    Attributes:
        name: for the command line.
        file: in the repository.
        old: text that occurs once in the file.
        new: what a careless change makes of it.
        test: the test that finds it, as pytest takes it: a file or a node.
    """

    name: str
    file: str
    old: str
    new: str
    test: str


@dataclass(frozen=True)
class Verdict:
    """What came of one fault; `said` is empty if it was found."""

    word: str
    seconds: float
    said: str = ""


def read_faults(folder: Path = FAULTS) -> list[Fault]:
    """Return all faults. Raises ValueError for a name that is there twice."""
    tables = [tomllib.loads(path.read_text()) for path in sorted(folder.glob("*.toml"))]
    faults = [Fault(**entry) for table in tables for entry in table["fault"]]
    names = [fault.name for fault in faults]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{folder}: there twice: {', '.join(twice)}")
    return faults


def planted(fault: Fault, text: str) -> str | None:
    """Return `text`, of the fault's file, with the fault; None if it has no place there.

    Raises SyntaxError for a fault that any test would find.
    """
    if text.count(fault.old) != 1 or fault.old == fault.new:
        return None
    changed = text.replace(fault.old, fault.new)
    if fault.file.endswith(".py"):
        compile(changed, fault.file, "exec")
    return changed


def copy_tree(target: Path) -> Path:
    """Copy the files that git knows, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)
    return target


def run_pytest(tree: Path, test: str) -> tuple[int | None, str]:
    """Return pytest's exit code, None past the limit, and the last line that it wrote."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        # Files that change twice in a second would have the bytecode of before.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = ["-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [sys.executable, *command, *test.split()],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then runs the fixtures' ends.
        try:
            process.communicate(timeout=ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return None, f"no end within {LIMIT_SECONDS} s"
    lines = [line for line in output.splitlines() if line.strip()]
    return process.returncode, lines[-1].strip("= ") if lines else "without a word"


def complaint_without_fault(tree: Path, test: str) -> str:
    """Return why `test` can find nothing in a tree without faults; empty if it passes there, all of it."""
    code, said = run_pytest(tree, test)
    if code == PASSED and re.search(r"\d+ passed", said) and "skipped" not in said:
        return ""
    return f"the test does not pass without the fault: {said}"


def verdict_of(code: int | None, said: str) -> tuple[str, str]:
    """Return what a run of a test, which passes without it, says of the fault."""
    if code == FAILED:
        return "found", ""
    return "NOT FOUND", said if code == PASSED else f"pytest ended with {code}: {said}"


class Plantation:
    """Copies of the tree, each lent to one fault at a time, and what tests say without faults."""

    def __init__(self, trees: Sequence[Path]) -> None:
        self._free: queue.Queue[Path] = queue.Queue()
        for tree in trees:
            self._free.put(tree)
        self._complaints: dict[str, str] = {}

    def check_tests(self, tests: Sequence[str]) -> None:
        """Run the tests without faults: all at once, and each alone if that goes wrong."""
        tree = self._free.get()
        alone = tests if complaint_without_fault(tree, " ".join(tests)) else ()
        self._complaints = dict.fromkeys(tests, "")
        self._complaints |= {test: complaint_without_fault(tree, test) for test in alone}
        self._free.put(tree)

    def judge(self, fault: Fault) -> Verdict:
        """Plant a fault and run its test, which `check_tests` has run before."""
        begin = time.monotonic()
        tree = self._free.get()
        path = tree / fault.file
        try:
            text = path.read_text() if path.is_file() else ""
            changed = planted(fault, text)
            if changed is None:
                return Verdict("no longer applies", 0.0, f"its text is not once in {fault.file}")
            if complaint := self._complaints[fault.test]:
                return Verdict("NOT FOUND", 0.0, complaint)
            path.write_text(changed)
            try:
                word, said = verdict_of(*run_pytest(tree, fault.test))
            finally:
                path.write_text(text)
            return Verdict(word, time.monotonic() - begin, said)
        finally:
            self._free.put(tree)


def chosen(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Return the faults of these names, all if there are none. Ends with a message for a name that is none's."""
    known = {fault.name for fault in faults}
    if unknown := sorted(set(names) - known):
        sys.exit(f"no such fault: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [fault for fault in faults if not names or fault.name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; default: all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time")
    options = parser.parse_args()
    faults = chosen(read_faults(), options.names)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-faults-") as folder:
        trees = [copy_tree(Path(folder) / str(number)) for number in range(max(1, options.jobs))]
        plantation = Plantation(trees)
        plantation.check_tests(list(dict.fromkeys(fault.test for fault in faults)))
        verdicts = []
        with ThreadPoolExecutor(len(trees)) as pool:
            for fault, verdict in zip(faults, pool.map(plantation.judge, faults), strict=True):
                said = f"  ({verdict.said})" if verdict.said else ""
                print(
                    f"{verdict.word:<17}  {verdict.seconds:6.1f} s  {fault.name:<40}  {fault.test}{said}",
                    flush=True,
                )
                verdicts.append(verdict.word)
    counts = {word: verdicts.count(word) for word in ("found", "NOT FOUND", "no longer applies")}
    told = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    print(f"{len(faults)} faults: {told}, in {time.monotonic() - begin:.0f} s")
    sys.exit(0 if counts["found"] == len(faults) else 1)


if __name__ == "__main__":
    main()
