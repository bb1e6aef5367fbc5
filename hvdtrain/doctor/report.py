"""Results as lines for a person, or as JSON for a program."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence

import click

from hvdtrain.doctor.checks import Result, Status

SCHEMA = 1
_NAME_WIDTH = 22
_LONGEST = 500
_CLEAR = "\r\033[K"
"""Empties a terminal's line. No colour: click.echo is to pass it on where colours are off, too."""
_WORDS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "red"),
    "skip": ("skip", "bright_black"),
}


def lines_of(result: Result) -> list[str]:
    """The result, and below it the fix if there is one."""
    word, colour = _WORDS[result.status]
    mark = click.style(f"{word:<4}", fg=colour, bold=result.status == "fail")
    lines = [f"  {mark}  {result.name:<{_NAME_WIDTH}}  {_in_a_line(result.seen)}"]
    if result.fix:
        lines.append(f"{'':{_NAME_WIDTH + 8}}  fix: {_in_a_line(result.fix)}")
    return lines


def _in_a_line(text: str) -> str:
    """What a program, a host or a variable says, without what would move in the terminal or fill it."""
    kept = "".join(character if character.isprintable() else "?" for character in text[:_LONGEST])
    return kept + "..." * (len(text) > _LONGEST)


def summary(results: Sequence[Result], seconds: float) -> str:
    """`2 failures, 1 warning in 21 s`, or that all is well."""
    failed, warned = count(results, "fail"), count(results, "warn")
    parts = [
        f"{number} {word}{'s' * (number != 1)}"
        for number, word in ((failed, "failure"), (warned, "warning"))
        if number
    ]
    text = ", ".join(parts) or "all is well"
    colour = "red" if failed else "yellow" if warned else "green"
    return click.style(f"{text} ({seconds:.0f} s)", fg=colour, bold=True)


def count(results: Sequence[Result], status: Status) -> int:
    return sum(result.status == status for result in results)


def as_json(grouped: Sequence[tuple[str, Result]], versions: dict[str, str], seconds: float) -> str:
    """One object: schema, ok, failures, warnings, seconds, hvdtrain, findings.

    `findings` is a list of objects with group, name, status (ok, warn, fail, skip), seen and fix ('' if none is
    needed), in the order in which they are shown to a person. `schema` changes when a field changes or goes.
    """
    results = [result for _, result in grouped]
    answer = {
        "schema": SCHEMA,
        "ok": count(results, "fail") == 0,
        "failures": count(results, "fail"),
        "warnings": count(results, "warn"),
        "seconds": round(seconds, 1),
        **versions,
        "findings": [{"group": group, **dataclasses.asdict(result)} for group, result in grouped],
    }
    return json.dumps(answer, indent=2)


class Wait:
    """The moving line that says what is being checked; nothing where there is no terminal."""

    def __init__(self, moves: bool) -> None:
        self._moves = moves
        self._drawn = False

    def draw(self, names: Sequence[str], seconds: float) -> None:
        if self._moves:
            text = f"  ...   {', '.join(names)} ({seconds:.0f} s)"
            width = shutil.get_terminal_size().columns - 1
            click.echo(f"{_CLEAR}{text[:width]}", nl=False, color=True)
            self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            click.echo(_CLEAR, nl=False, color=True)
            self._drawn = False
