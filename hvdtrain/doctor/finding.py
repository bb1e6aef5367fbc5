"""What a probe found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        name: what was looked at.
        status: ok; warn: training works, but worse than it could; fail: it does not work; skip: does not apply here.
        seen: what is the case.
        fix: a command or a sentence; every warn and fail has one.
    """

    name: str
    status: Status
    seen: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.status in ("warn", "fail")), self


def ok(name: str, seen: str) -> Finding:
    return Finding(name, "ok", seen)


def warn(name: str, seen: str, fix: str) -> Finding:
    return Finding(name, "warn", seen, fix)


def fail(name: str, seen: str, fix: str) -> Finding:
    return Finding(name, "fail", seen, fix)


def skip(name: str, seen: str) -> Finding:
    return Finding(name, "skip", seen)
