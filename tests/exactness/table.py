"""The table of what is exact: every case on 1, 2 and 3 ranks against plain Keras in one process.

    python tests/exactness/table.py                     all cases, all numbers of ranks; exit code 1 if one is silent
    python tests/exactness/table.py --ranks 2 -k Adam   those with "Adam" in their group or name, on two ranks
    python tests/exactness/table.py --write             puts what it finds into docs/what-is-exact.md

The ranks of a number are started once, and take one case after the other (tests/ranks/pool.py).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "ranks")]

from exactness.case import Case  # noqa: E402
from exactness.families import CASES  # noqa: E402
from exactness.page import SIZES, read_page, row_of, write_page  # noqa: E402
from exactness.verdict import BROKEN, Verdict, judge, moved  # noqa: E402
from launch import on_ranks, pools  # noqa: E402

SECONDS = 120
"""For one case; most take less than two."""


class CaseError(Exception):
    """A case did not run on all ranks."""


def run(case: Case, size: int, name: str) -> list[Any]:
    """Return what `cases/exact.py` found on each rank.

    Raises:
        CaseError: on some rank it raised, or did not end.
    """
    env = {"TEST_EXACT": json.dumps(case.as_json())}
    ran = on_ranks("exact", size, env=env, timeout=SECONDS).ran(name)
    if ran.broken:
        errors = [one["error"].strip() for one in ran.found if "error" in one]
        raise CaseError(errors[0].splitlines()[-1] if errors else ran.broken)
    return [one["value"] for one in ran.found]


def reference(case: Case) -> dict[str, Any]:
    """Return what plain Keras finds.

    Raises:
        CaseError: it cannot train this, or nothing moves.
    """
    (wanted,) = run(case, 1, "case_keras")
    if moved(wanted) < 1e-3:
        raise CaseError("plain Keras does not move the weights: the case says nothing")
    return wanted


def verdict(case: Case, size: int, wanted: dict[str, Any]) -> Verdict:
    try:
        return judge(case, wanted, run(case, size, "case_trainer"))
    except CaseError as error:
        return Verdict(BROKEN, why=str(error))


def verdicts(cases: Sequence[Case], sizes: Sequence[int]) -> Iterator[tuple[Case, list[Verdict]]]:
    """Yield each case with what is said of it on each number of ranks."""
    for case in cases:
        try:
            wanted = reference(case)
        except CaseError as error:
            yield case, [Verdict(BROKEN, why=f"plain Keras: {error}")] * len(sizes)
        else:
            yield case, [verdict(case, size, wanted) for size in sizes]


def line(case: Case, found: Sequence[Verdict]) -> str:
    shown = "  ".join(f"{each.word:8}{each.apart:8.1e}" for each in found)
    why = next((each.why for each in found if each.why), "")
    return f"{shown}  {case}" + (f"\n    {why}" if why else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print the table of what is exact.")
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="default: 1 2 3")
    parser.add_argument(
        "-k",
        dest="pattern",
        default="",
        help="only cases in which this is found, a regular expression",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="put the rows into docs/what-is-exact.md, those at fault excepted",
    )
    given = parser.parse_args(arguments)
    if given.write and tuple(given.ranks) != SIZES:
        parser.error("--write: a row of the page is about 1, 2 and 3 ranks")
    start, done, faults = time.monotonic(), 0, 0
    cases = [case for case in CASES if re.search(given.pattern, str(case))]
    try:
        for case, found in verdicts(cases, given.ranks):
            print(line(case, found), flush=True)
            done += 1
            is_fault = any(one.is_fault for one in found)
            faults += is_fault
            if given.write and not is_fault:
                write_page(read_page() | {str(case): row_of(found)}, CASES)
    finally:
        pools().close()
    print(f"{done} cases in {time.monotonic() - start:.0f} s: {faults} at fault")
    return 1 if faults or not done else 0


if __name__ == "__main__":
    sys.exit(main())
