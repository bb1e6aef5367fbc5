"""Findings as lines for a person, or as JSON for a program."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence

import click

from hvdtrain.doctor.finding import Finding, Status

SCHEMA = 1
_NAME_WIDTH = 22
_CLEAR = "\r\033[K"
"""Empties a terminal's line. No colour: click.echo is to pass it on where colours are off, too."""
_WORDS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "red"),
    "skip": ("skip", "bright_black"),
}


def lines_of(finding: Finding) -> list[str]:
    """The finding, and below it the fix if there is one."""
    word, colour = _WORDS[finding.status]
    mark = click.style(f"{word:<4}", fg=colour, bold=finding.status == "fail")
    lines = [f"  {mark}  {finding.name:<{_NAME_WIDTH}}  {finding.seen}"]
    if finding.fix:
        lines.append(f"{'':{_NAME_WIDTH + 8}}  fix: {finding.fix}")
    return lines


def summary(findings: Sequence[Finding], seconds: float) -> str:
    """`2 failures, 1 warning in 21 s`, or that all is well."""
    failed, warned = count(findings, "fail"), count(findings, "warn")
    parts = [
        f"{number} {word}{'s' * (number != 1)}"
        for number, word in ((failed, "failure"), (warned, "warning"))
        if number
    ]
    text = ", ".join(parts) or "all is well"
    colour = "red" if failed else "yellow" if warned else "green"
    return click.style(f"{text} ({seconds:.0f} s)", fg=colour, bold=True)


def count(findings: Sequence[Finding], status: Status) -> int:
    return sum(finding.status == status for finding in findings)


def as_json(
    grouped: Sequence[tuple[str, Finding]], versions: dict[str, str], seconds: float
) -> str:
    """One object: schema, ok, failures, warnings, seconds, hvdtrain, findings.

    `findings` is a list of objects with group, name, status (ok, warn, fail, skip), seen and fix ('' if none is
    needed), in the order in which they are shown to a person. `schema` changes when a field changes or goes.
    """
    findings = [finding for _, finding in grouped]
    answer = {
        "schema": SCHEMA,
        "ok": count(findings, "fail") == 0,
        "failures": count(findings, "fail"),
        "warnings": count(findings, "warn"),
        "seconds": round(seconds, 1),
        **versions,
        "findings": [
            {
                "group": group,
                "name": finding.name,
                "status": finding.status,
                "seen": finding.seen,
                "fix": finding.fix,
            }
            for group, finding in grouped
        ],
    }
    return json.dumps(answer, indent=2)


class Wait:
    """The moving line that says what is being probed; nothing where there is no terminal."""

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
