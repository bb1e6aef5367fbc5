"""docs/what-is-exact.md: the table as a page for users."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from exactness.case import BATCH, IDLE, Case
from exactness.verdict import HALF, TOLERANCE, Verdict

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what-is-exact.md"
SIZES = (1, 2, 3)
"""Numbers of workers."""

INTRODUCTION = """\
# What is exact

With the same seed, data and global batch, `hvdtrain.Trainer` on N workers trains as plain Keras does in one process.
Each row of this page is a small training, run by `model.fit` in one process and by the Trainer on {sizes} workers:

- **equal**: all weights and statistics, the loss and metrics of each epoch, and the results of `evaluate` and `predict`
  differ by at most {tolerance:g} (relative, for values above 1), as float32 sums are made in a different order. Sums
  are rounded to 11 bits under mixed_float16 and to 8 bits under mixed_bfloat16; the limits are {half}.
- **warned**: they differ, and a warning names what differs.
- **refused**: `fit` raises UsageError before the first step.

The command that writes this page fails if they differ without a warning.

Each training has {steps} steps in two epochs, with global batches of {batch} examples. Unless a row states otherwise,
the last batch of an epoch has one example, so that with three workers two are idle in it. Names that are not Keras's,
such as `Heads()`, are in `tests/exactness/`.

Written by `python tests/exactness/table.py --write`, which repeats all trainings, with
{versions}.
"""


@dataclass(frozen=True)
class Row:
    """What the page says of a case: a word for each number of workers, and why."""

    words: tuple[str, ...]
    why: str


def row_of(verdicts: Sequence[Verdict]) -> Row:
    """Return the row of these verdicts, one for each of SIZES."""
    why = next((one.why for one in verdicts if one.why), "")
    # Up to the particulars, which are other ones on another day.
    return Row(tuple(one.word for one in verdicts), re.split(r": | \(|\. |, at ", why)[0])


def read_page() -> dict[str, Row]:
    """Return what the page says, by str(case)."""
    found, group = {}, ""
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        if line.startswith("## "):
            group = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| workers: |", "| ---")):
            name, *words, why = re.split(r"(?<!\\) \| ", line[2:-2])
            name = name.strip("`").replace("\\|", "|")
            found[f"{group[0].lower()}{group[1:]}: {name}"] = Row(tuple(words), why.strip())
    return found


def write_page(rows: Mapping[str, Row], cases: Sequence[Case]) -> None:
    """Write the page of `cases`, as far as there are rows of them."""
    PAGE.parent.mkdir(exist_ok=True)
    known = [case for case in cases if str(case) in rows]
    PAGE.write_text("\n".join(_lines(rows, known)))


def _lines(rows: Mapping[str, Row], cases: Sequence[Case]) -> Iterator[str]:
    programs = {"TensorFlow": "tensorflow-cpu", "Keras": "keras", "Horovod": "horovod"}
    yield INTRODUCTION.format(
        sizes=_listed([str(size) for size in SIZES]),
        tolerance=TOLERANCE,
        half=_listed([f"{limit:g}" for limit in HALF.values()]),
        steps=2 * -(-IDLE // BATCH),
        batch=BATCH,
        versions=_listed([f"{name} {version(package)}" for name, package in programs.items()]),
    )
    for group in dict.fromkeys(case.group for case in cases):
        yield f"## {group[0].upper()}{group[1:]}\n"
        yield f"| workers: | {' | '.join(map(str, SIZES))} | reason |"
        yield "| --- " * (len(SIZES) + 2) + "|"
        for case in cases:
            if case.group == group:
                row = rows[str(case)]
                yield f"| {_shown(case.name)} | {' | '.join(row.words)} | {row.why} |"
        yield ""


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _shown(name: str) -> str:
    """A name as Markdown: code where it is code."""
    text = name.replace("|", "\\|")
    return f"`{text}`" if re.match(r"\w+\(", name) and name.endswith(")") else text
