"""Run checks (groups in parallel, the checks of a group in sequence, each with a time limit), and format their
results for a person or as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from hvdtrain.launch.running.time_limits import COMMAND_SECONDS
from hvdtrain.launch.running.timed_command import CompletedCommand

Status = Literal["ok", "warn", "fail", "skip"]
SCHEMA = 1
_SPARE_SECONDS = 2 * COMMAND_SECONDS + 3
"""Extra time for a check to end its own commands, two at most, as it can then report more than a timeout here."""
_NAME_WIDTH = 22
_LONGEST = 500
_WORDS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "red"),
    "skip": ("skip", "bright_black"),
}


@dataclass(frozen=True)
class Result:
    """One result of the doctor.

    Attributes:
        name: Name of what was checked.
        status: "ok"; "warn": training works, but not as well as it could; "fail": training does not work; "skip": the
            check does not apply here.
        seen: What was found.
        fix: Command or sentence; set for every "warn" and "fail", and optional for "skip".
    """

    name: str
    status: Status
    seen: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.status == "skip" or bool(self.fix) == (self.status != "ok"), self


def ok(name: str, seen: str) -> Result:
    """Return a result for something that works."""
    return Result(name, "ok", seen)


def warn(name: str, seen: str, fix: str) -> Result:
    """Return a result for something that works, but not well."""
    return Result(name, "warn", seen, fix)


def fail(name: str, seen: str, fix: str) -> Result:
    """Return a result for something that does not work."""
    return Result(name, "fail", seen, fix)


def skip(name: str, seen: str, fix: str = "") -> Result:
    """Return a result for something that is not needed, or not available here."""
    return Result(name, "skip", seen, fix)


def took_too_long(name: str, limit: float, fix: str = "") -> Result:
    """Return the result of a check that exceeded its time limit of `limit` seconds."""
    return fail(
        name,
        f"took longer than {limit:g} s",
        fix
        or "the machine may be busy, or a file system or network down; --timeout sets a longer "
        "limit",
    )


def marked_answer(said: CompletedCommand, marker: str) -> dict[str, Any] | None:
    """Return the JSON object in the last line that starts with `marker`, or None. Other output is ignored."""
    for line in reversed(said.stdout.splitlines()):
        if line.startswith(marker):
            with contextlib.suppress(ValueError):
                answer: dict[str, Any] = json.loads(line.removeprefix(marker))
                return answer
    return None


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, or none if it does not exist or cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


@dataclass(frozen=True)
class Options:
    """What the user asks the doctor to check.

    Attributes:
        environ: Environment that a launch would have.
        limit: Time limit of one check, in seconds.
        hosts: Names of other hosts. If empty, only this machine is checked.
        interfaces: Network interfaces to use between the hosts. If empty, any.
        ssh_port, ssh_identity_file: Settings for ssh. None leaves them to its configuration.
    """

    environ: Mapping[str, str]
    limit: float = 60.0
    hosts: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    ssh_port: int | None = None
    ssh_identity_file: Path | None = None

    @property
    def quick(self) -> float:
        """Time limit in seconds for commands that respond at once on a healthy machine; at most `limit`."""
        return min(10.0, self.limit)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        group: Heading under which it is shown. Checks of one group run in sequence.
        name: Name under which it is shown.
        look: Function that returns the results; may block.
        limit: Time limit in seconds.
    """

    group: str
    name: str
    look: Callable[[], Sequence[Result]]
    limit: float


def run_checks(
    checks: Sequence[Check],
) -> Iterator[tuple[Check, Future[Sequence[Result]]]]:
    """Start `checks`, and yield each with the future of its results, in order."""
    stopped = threading.Event()
    started: list[tuple[Check, Future[Sequence[Result]]]] = [(check, Future()) for check in checks]

    def run_group(group: str) -> None:
        for check, results in started:
            if check.group == group and not stopped.is_set():
                results.set_result(_within_limit(check))

    for group in dict.fromkeys(check.group for check in checks):
        threading.Thread(target=run_group, args=(group,), daemon=True).start()
    try:
        yield from started
    finally:
        stopped.set()  # The results have no reader any more, for example after Ctrl-C: start no more checks.


def _within_limit(check: Check) -> Sequence[Result]:
    """Return the check's results. A thread that hangs (in a name service, say) cannot be ended, and is left behind."""
    answer: Future[Sequence[Result]] = Future()

    def look() -> None:
        try:
            answer.set_result(check.look())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=look, daemon=True).start()
    try:
        return answer.result(check.limit + _SPARE_SECONDS)
    except Exception as error:
        if not answer.done():
            return [took_too_long(check.name, check.limit)]
        seen = f"the check itself crashed: {type(error).__name__}: {error}"
        return [fail(check.name, seen, "report it, with the output of: hvdtrain --version")]


def lines_of(result: Result) -> list[str]:
    """Format a result: a line with what was found, and one with the fix if there is one."""
    word, colour = _WORDS[result.status]
    mark = click.style(f"{word:<4}", fg=colour, bold=result.status == "fail")
    lines = [f"  {mark}  {result.name:<{_NAME_WIDTH}}  {_in_a_line(result.seen)}"]
    if result.fix:
        lines.append(f"{'':{_NAME_WIDTH + 8}}  fix: {_in_a_line(result.fix)}")
    return lines


def _in_a_line(text: str) -> str:
    """Shorten text from elsewhere, and replace characters that would affect the terminal."""
    kept = "".join(character if character.isprintable() else "?" for character in text[:_LONGEST])
    return kept + "..." * (len(text) > _LONGEST)


def summary(results: Sequence[Result], seconds: float) -> str:
    """Format the number of failures and warnings and the duration in seconds, or that everything passed."""
    failed, warned = count(results, "fail"), count(results, "warn")
    parts = [
        f"{number} {word}{'s' * (number != 1)}"
        for number, word in ((failed, "failure"), (warned, "warning"))
        if number
    ]
    text = ", ".join(parts) or "everything passed"
    colour = "red" if failed else "yellow" if warned else "green"
    return click.style(f"{text} ({seconds:.0f} s)", fg=colour, bold=True)


def count(results: Sequence[Result], status: Status) -> int:
    """Return the number of results with a status."""
    return sum(result.status == status for result in results)


def as_json(grouped: Sequence[tuple[str, Result]], versions: dict[str, str], seconds: float) -> str:
    """Format the results as a JSON object: schema, ok, failures, warnings, seconds, the `versions`, findings.

    `findings` is a list of objects with group, name, status (ok, warn, fail, skip), seen and fix ('' if none is
    needed), in the order in which they are shown to a person. `schema` is raised when a field changes or is removed.
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
