"""Runs probes: those of different lanes beside each other, those of one lane in turn, each within its time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.doctor.finding import Finding, fail

_TICK_SECONDS = 0.2
_SPARE_SECONDS = 10.0
"""A probe ends its own commands when its time is over, and says more than we can here: let it."""


@dataclass(frozen=True)
class Probe:
    """One look at one thing.

    Attributes:
        group, name: where and as what it is shown.
        look: makes the findings; may block.
        limit: seconds that it may take.
        lane: probes with the same lane disturb each other, and run one after the other.
    """

    group: str
    name: str
    look: Callable[[], Sequence[Finding]]
    limit: float
    lane: str


Found = tuple[Probe, Sequence[Finding]]


def examine(
    probes: Sequence[Probe], waiting: Callable[[Sequence[str], float], None]
) -> Iterator[Found]:
    """The findings of each probe, in the order of `probes`, each as soon as it and those before it are known.

    Args:
        waiting: called now and then with the names of what is being probed, and the seconds since the start.
    """
    start = time.monotonic()
    done: queue.SimpleQueue[tuple[int, Sequence[Finding]]] = queue.SimpleQueue()
    stopped = threading.Event()
    running: dict[int, str] = {}
    lanes: dict[str, list[int]] = {}
    for number, probe in enumerate(probes):
        lanes.setdefault(probe.lane, []).append(number)

    def follow(numbers: Sequence[int]) -> None:
        for number in numbers:
            if stopped.is_set():
                return
            running[number] = probes[number].name
            findings = _within_limit(probes[number])
            del running[number]
            done.put((number, findings))

    for numbers in lanes.values():
        threading.Thread(target=follow, args=(numbers,), daemon=True).start()
    known: dict[int, Sequence[Finding]] = {}
    shown = 0
    try:
        while shown < len(probes):
            try:
                number, findings = done.get(timeout=_TICK_SECONDS)
                known[number] = findings
            except queue.Empty:
                waiting([running[number] for number in sorted(running)], time.monotonic() - start)
            while shown in known:
                yield probes[shown], known[shown]
                shown += 1
    finally:
        stopped.set()  # Nobody listens any more, after Ctrl-C for example: start no more probes.


def _within_limit(probe: Probe) -> Sequence[Finding]:
    """What the probe finds. A thread that hangs (in a name service, say) cannot be ended: it is left behind."""
    result: queue.SimpleQueue[Sequence[Finding] | Exception] = queue.SimpleQueue()

    def look() -> None:
        try:
            result.put(probe.look())
        except Exception as error:
            # Not to be lost in a thread: a probe's own fault is a red line, too.
            result.put(error)

    threading.Thread(target=look, daemon=True).start()
    try:
        found = result.get(timeout=probe.limit + _SPARE_SECONDS)
    except queue.Empty:
        return [took_too_long(probe.name, probe.limit)]
    if isinstance(found, Exception):
        seen = f"the probe itself failed: {type(found).__name__}: {found}"
        return [fail(probe.name, seen, "report it, with the output of: hvdtrain --version")]
    return found


def took_too_long(name: str, limit: float, fix: str = "") -> Finding:
    """The red line of what did not end."""
    return fail(
        name,
        f"took longer than {limit:g} s",
        fix or "is the machine busy, or a file system or network gone? Give more time: --timeout",
    )
