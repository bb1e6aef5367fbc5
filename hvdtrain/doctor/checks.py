"""A check and its results; and how checks run: those of different groups beside each other, those of one group in turn,
each within its time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.launch.running.bounded import GRACE_SECONDS

Status = Literal["ok", "warn", "fail", "skip"]
_TICK_SECONDS = 0.2
_SPARE_SECONDS = 2 * GRACE_SECONDS + 3
"""A check ends its own commands, two at most, when their time is over, and says more than we can here: let it."""


@dataclass(frozen=True)
class Result:
    """One line of the doctor's.

    Attributes:
        name: what was checked.
        status: ok; warn: training works, but worse than it could; fail: it does not work; skip: does not apply here.
        seen: what is the case.
        fix: a command or a sentence; every warn and fail has one, and a skip may.
    """

    name: str
    status: Status
    seen: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.status == "skip" or bool(self.fix) == (self.status != "ok"), self


def ok(name: str, seen: str) -> Result:
    return Result(name, "ok", seen)


def warn(name: str, seen: str, fix: str) -> Result:
    return Result(name, "warn", seen, fix)


def fail(name: str, seen: str, fix: str) -> Result:
    return Result(name, "fail", seen, fix)


def skip(name: str, seen: str, fix: str = "") -> Result:
    return Result(name, "skip", seen, fix)


def took_too_long(name: str, limit: float, fix: str = "") -> Result:
    """The result of what did not end."""
    return fail(
        name,
        f"took longer than {limit:g} s",
        fix or "is the machine busy, or a file system or network gone? Give more time: --timeout",
    )


def names_in(folder: Path) -> list[str]:
    """The names in a folder; none if it is not there, or not for this user."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


@dataclass(frozen=True)
class Options:
    """What the user asks the doctor to check.

    Attributes:
        environ: the environment that a launch would have.
        limit: seconds that one check may take.
        hosts: names of other hosts; empty: this machine only.
        interfaces: network interfaces to use between the hosts; empty: any.
        ssh_port, ssh_identity_file: how to reach them; None leaves it to ssh and its configuration.
    """

    environ: Mapping[str, str]
    limit: float = 60.0
    hosts: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    ssh_port: int | None = None
    ssh_identity_file: Path | None = None

    @property
    def quick(self) -> float:
        """Seconds for what answers at once on a machine that works; less if the user allows less."""
        return min(10.0, self.limit)


@dataclass(frozen=True)
class Check:
    """One look at one thing.

    Attributes:
        group, name: where and as what it is shown; checks of one group run one after the other.
        look: makes the results; may block.
        limit: seconds that it may take.
    """

    group: str
    name: str
    look: Callable[[], Sequence[Result]]
    limit: float


def run_checks(
    checks: Sequence[Check], waiting: Callable[[Sequence[str], float], None]
) -> Iterator[tuple[Check, Sequence[Result]]]:
    """The results of each check, in the order of `checks`, each as soon as it and those before it are known.

    Args:
        waiting: called now and then with the names of the checks that run, and the seconds since the start.
    """
    start = time.monotonic()
    done: queue.SimpleQueue[tuple[int, Sequence[Result]]] = queue.SimpleQueue()
    stopped = threading.Event()
    running: dict[int, str] = {}
    groups: dict[str, list[int]] = {}
    for number, check in enumerate(checks):
        groups.setdefault(check.group, []).append(number)

    def follow(numbers: Sequence[int]) -> None:
        for number in numbers:
            if stopped.is_set():
                return
            running[number] = checks[number].name
            results = _within_limit(checks[number])
            del running[number]
            done.put((number, results))

    for numbers in groups.values():
        threading.Thread(target=follow, args=(numbers,), daemon=True).start()
    known: dict[int, Sequence[Result]] = {}
    shown = 0
    try:
        while shown < len(checks):
            try:
                number, results = done.get(timeout=_TICK_SECONDS)
                known[number] = results
            except queue.Empty:
                names = [name for _, name in sorted(running.copy().items())]
                waiting(names, time.monotonic() - start)
            while shown in known:
                yield checks[shown], known[shown]
                shown += 1
    finally:
        stopped.set()  # Nobody listens any more, after Ctrl-C for example: start no more checks.


def _within_limit(check: Check) -> Sequence[Result]:
    """The check's results. A thread that hangs (in a name service, say) cannot be ended: it is left behind."""
    answer: queue.SimpleQueue[Sequence[Result] | Exception] = queue.SimpleQueue()

    def look() -> None:
        try:
            answer.put(check.look())
        except Exception as error:
            # Not to be lost in a thread: a check's own fault is a red line, too.
            answer.put(error)

    threading.Thread(target=look, daemon=True).start()
    try:
        results = answer.get(timeout=check.limit + _SPARE_SECONDS)
    except queue.Empty:
        return [took_too_long(check.name, check.limit)]
    if isinstance(results, Exception):
        seen = f"the check itself failed: {type(results).__name__}: {results}"
        return [fail(check.name, seen, "report it, with the output of: hvdtrain --version")]
    return results
