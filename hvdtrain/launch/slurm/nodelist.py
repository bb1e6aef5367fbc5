"""Expand Slurm's abbreviated lists: nodes `gpu[01-04,07],cpu3`, counts `4(x2),3`.

Done without `scontrol show hostnames`, so that a launch can be previewed on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from hvdtrain.errors import UsageError

MOST_NODES = 65_536
"""More than any cluster has; a longer list is a typing error, such as `n[1-99999999]`."""

_TERM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,18})(?:\(x(\d{1,18})\))?", re.ASCII)


def expand_nodes(text: str) -> tuple[str, ...]:
    """Return the names in `gpu[01-04,07],cpu3`, in the order in which Slurm numbers the nodes.

    Several brackets in one name produce all combinations, with the first bracket changing slowest.

    Raises:
        UsageError: The list is invalid, or names more than MOST_NODES nodes.
    """
    names: list[str] = []
    for term in _terms(text):
        names += _expand(term, text, MOST_NODES - len(names))
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers in `4(x2),3`: (4, 4, 3). Raises UsageError if the list is invalid."""
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        times = int(match[2] or 1) if match else 0
        if match is None or not 1 <= times <= MOST_NODES - len(counts):
            raise UsageError(f"cannot read {item!r} in {text!r}: expected numbers such as 4(x2),3")
        counts += [int(match[1])] * times
    return tuple(counts)


def _terms(text: str) -> Iterator[str]:
    """Yield the parts between commas outside of brackets."""
    position = 0
    while True:
        match = _TERM.match(text, position)
        if match is None:
            raise UsageError(
                f"cannot read the node list {text!r} from {text[position:]!r} on: expected names "
                "such as gpu[01-04,07],cpu3"
            )
        yield match[0]
        position = match.end()
        if position == len(text):
            return
        if text[position] == ",":
            position += 1


def _expand(term: str, text: str, most: int) -> list[str]:
    """Return the names of one term, such as `gpu[01-04,07]`."""
    pieces = _BRACKET.split(term)  # Alternately fixed text and the content of a bracket.
    choices = [
        _numbers(piece, text) if index % 2 else [piece] for index, piece in enumerate(pieces)
    ]
    size = 1
    for choice in choices:
        size *= len(choice)
    if size > most:
        raise UsageError(f"the node list {text!r} names more than {MOST_NODES} nodes")
    return ["".join(parts) for parts in product(*choices)]


def _numbers(inside: str, text: str) -> list[str]:
    """Expand `01-04,07` to 01 02 03 04 07. The width of each range's first number is kept."""
    numbers: list[str] = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise UsageError(f"cannot read [{inside}] in the node list {text!r}: {item!r}")
        if last - first >= MOST_NODES:
            raise UsageError(f"the node list {text!r} names more than {MOST_NODES} nodes")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers
