"""What Horovod's timeline tells: where the time of each tensor went, and which rank the others waited for.

Rank 0 writes the timeline (docs: Horovod Timeline). For each collective of a tensor it holds a negotiation, in which a
mark names each rank that is ready, and then the operation, made of activities: in the queue, copies into and out of
the fusion buffer, communication. Times are those of rank 0.

Tensors of one fused operation share its activities, and a negotiation overlaps with operations of other tensors. So the
sums over tensors say little; `Kind.seconds` of the whole counts a moment once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.report.timeline_events import Events

NEGOTIATION, QUEUE, COPIES, COMMUNICATION, OTHER = KINDS = (
    "negotiation", "queue", "copies", "communication", "other",
)  # fmt: skip
"""What a tensor's time is spent on."""
MOST_TENSORS = 10_000
"""Tensors with figures of their own: a script that gives its collectives no names makes new ones all the time."""
OTHERS = "(other tensors)"
_MOST_OPEN = 100_000
"""Tensors in the middle of something."""
_DEEPEST = 3
_LATEST = 1e15
"""Microseconds, some thirty years."""
_BITS = re.compile(r"\d+$")


@dataclass
class TensorTimes:
    """What happened to one tensor, summed over its operations.

    Attributes:
        operations: that ended.
        bytes: of these operations, as far as the timeline tells.
        seconds: of each kind.
    """

    name: str
    operations: int = 0
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))


@dataclass
class Summary:
    """What a timeline tells.

    Attributes:
        seconds: from its first to its last event.
        busy: seconds in which at least one tensor was in this kind of activity; they overlap.
        in_flight: seconds in which at least one tensor was in any of them.
        tensors: those with the longest times first.
        operations: collectives of single tensors that ended.
        bytes: of these.
        messages: number of tensors that travelled in one -> how many times.
        cycles: of Horovod's background thread; 0 unless they were marked.
        cycles_used: cycles in which communication began.
        cycle_seconds: the mean length of a cycle.
        last: rank -> how many times it was the last one to be ready, where all were seen.
        waits: rank -> seconds from the first rank's being ready to its own, where it was the last.
        ranks: that were seen.
        unfinished: tensors in the middle of something at the end.
        damaged: places that could not be read.
    """

    seconds: float
    busy: dict[str, float]
    in_flight: float
    tensors: list[TensorTimes]
    operations: int
    bytes: int
    messages: dict[int, int]
    cycles: int
    cycles_used: int
    cycle_seconds: float | None
    last: dict[int, int]
    waits: dict[int, float]
    ranks: int
    unfinished: int
    damaged: int


def read_timeline(path: Path) -> Summary:
    """Return what the timeline in `path` tells. It may be cut off anywhere; memory does not depend on its length.

    Raises:
        UsageError: not a timeline of Horovod, or one without an operation.
        EngineError: the file cannot be read.
    """
    events = Events(path)
    tally = _Tally()
    for event in events:
        if not tally.add(event):
            events.damaged += 1
        if len(tally.open) > _MOST_OPEN:
            raise events.refused("not a timeline of Horovod: too many operations never end")
    summary = tally.summary(events.damaged)
    if not summary.tensors:
        raise UsageError(f"{path} holds no operation of Horovod")
    return summary


@dataclass
class _Block:
    """Something of a tensor that has begun; in a negotiation, which ranks were ready when."""

    kind: str
    begin: float
    ready: list[tuple[int, float]] = field(default_factory=list)


class _Busy:
    """Seconds in which at least one of something was under way."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0
        self._begin = 0.0

    def begin(self, now: float) -> None:
        if not self._count:
            self._begin = now
        self._count += 1

    def end(self, now: float) -> None:
        self._count -= 1
        if not self._count:
            self.seconds += max(0.0, now - self._begin)


class _Tally:
    """Adds up events, one after the other."""

    def __init__(self) -> None:
        self.open: dict[int, list[_Block]] = {}
        self._tensors: dict[int, TensorTimes] = {}
        self._named: dict[str, TensorTimes] = {}
        self._others = TensorTimes(OTHERS)
        self._begin = math.inf
        self._end = 0.0
        self._busy = {kind: _Busy() for kind in KINDS}
        self._any = _Busy()
        self._together: set[int] = set()
        self._messages: Counter[int] = Counter()
        self._cycles: list[float] = []
        self._cycle_count = 0
        self._used = 0
        self._cycle_is_used = False
        self._negotiations: Counter[tuple[int, int]] = Counter()
        self._waits: dict[tuple[int, int], tuple[float, float]] = {}  # Seconds; until when.

    def add(self, event: dict[str, Any]) -> bool:
        """Return whether it is one of Horovod's."""
        phase, tensor = event["ph"], event.get("pid", 0)
        if phase == "M":
            self._name(event)
            return True
        now = event.get("ts")
        if not isinstance(now, int | float) or not 0 <= now <= _LATEST or type(tensor) is not int:
            return False
        now /= 1e6
        self._begin, self._end = min(self._begin, now), max(self._end, now)
        name = event.get("name")
        if phase == "i":
            self._mark_cycle(name, now)
            return True
        if phase == "E":
            return self._end_block(tensor, now, event.get("args"))
        if not isinstance(name, str):
            return False
        if phase == "X":
            blocks = self.open.get(tensor)
            if not blocks or not name.isdecimal() or len(name) > 7:
                return False
            blocks[-1].ready.append((int(name), now))
            return True
        return phase == "B" and self._begin_block(tensor, name, now)

    def _name(self, event: dict[str, Any]) -> None:
        args, tensor = event.get("args"), event.get("pid")
        if event.get("name") != "process_name" or type(tensor) is not int:
            return
        name = args.get("name") if isinstance(args, dict) else None
        self._tensors.pop(tensor, None)
        if isinstance(name, str) and len(self._tensors) < MOST_TENSORS:
            # A timeline that was started anew in the same file numbers its tensors anew.
            if name not in self._named and len(self._named) < MOST_TENSORS:
                self._named[name] = TensorTimes(name)
            self._tensors[tensor] = self._named.get(name, self._others)

    def _begin_block(self, tensor: int, name: str, now: float) -> bool:
        blocks = self.open.setdefault(tensor, [])
        if len(blocks) >= _DEEPEST:
            return False
        kind = _kind(name, len(blocks))
        blocks.append(_Block(kind, now))
        if len(blocks) == 1:
            self._any.begin(now)
        if kind in self._busy:
            self._busy[kind].begin(now)
        if kind == COMMUNICATION:
            self._cycle_is_used = True
            if tensor in self._together:
                self._close_message()
            self._together.add(tensor)
        else:
            self._close_message()
        return True

    def _close_message(self) -> None:
        """Tensors that travel in one message begin to one after another, with nothing in between."""
        if self._together:
            self._messages[len(self._together)] += 1
            self._together.clear()

    def _end_block(self, tensor: int, now: float, args: Any) -> bool:
        self._close_message()
        blocks = self.open.get(tensor)
        if not blocks:
            return False
        block = blocks.pop()
        times = self._tensors.get(tensor, self._others)
        if block.kind in self._busy:
            self._busy[block.kind].end(now)
            times.seconds[block.kind] += max(0.0, now - block.begin)
        if not blocks:
            del self.open[tensor]
            self._any.end(now)
        if block.kind == NEGOTIATION:
            self._note_ranks(block)
        elif not blocks:
            times.operations += 1
            times.bytes += _bytes(args) or 0
        return True

    def _note_ranks(self, block: _Block) -> None:
        """Note who was the last. Of tensors that wait at the same time, a moment counts once."""
        if not block.ready:
            return
        (_, first), (rank, last) = block.ready[0], block.ready[-1]
        key = (len(block.ready), rank)
        if key in self._negotiations or len(self._negotiations) < MOST_TENSORS:
            self._negotiations[key] += 1
            waited, until = self._waits.get(key, (0.0, 0.0))
            self._waits[key] = (waited + max(0.0, last - max(first, until)), max(last, until))

    def _mark_cycle(self, name: Any, now: float) -> None:
        if name == "CYCLE_START":
            self._cycle_count += 1
            self._used += self._cycle_is_used
            self._cycle_is_used = False
            self._cycles = [*self._cycles[:1], now]

    def summary(self, damaged: int) -> Summary:
        """Return all of it."""
        self._close_message()
        unfinished = len(self.open)
        for tensor in list(self.open):
            # Cut off: what has begun went on until the end.
            for block in reversed(self.open[tensor]):
                if block.kind in self._busy:
                    self._busy[block.kind].end(self._end)
            self._any.end(self._end)
        tensors = [t for t in [*self._named.values(), self._others] if sum(t.seconds.values())]
        tensors.sort(key=lambda tensor: -sum(tensor.seconds.values()))
        most = max((count for count, _ in self._negotiations), default=0)
        full = {rank: n for (count, rank), n in self._negotiations.items() if count == most > 1}
        waits = {rank: self._waits[most, rank][0] for rank in full}
        between = self._cycle_count - 1
        return Summary(
            seconds=max(0.0, self._end - self._begin),
            busy={kind: busy.seconds for kind, busy in self._busy.items()},
            in_flight=self._any.seconds,
            tensors=tensors,
            operations=sum(tensor.operations for tensor in tensors),
            bytes=sum(tensor.bytes for tensor in tensors),
            messages=dict(sorted(self._messages.items())),
            cycles=self._cycle_count,
            cycles_used=self._used + self._cycle_is_used if self._cycle_count else 0,
            cycle_seconds=(self._cycles[1] - self._cycles[0]) / between if between > 0 else None,
            last=dict(sorted(full.items())),
            waits=dict(sorted(waits.items())),
            ranks=most,
            unfinished=unfinished,
            damaged=damaged,
        )


def _kind(name: str, depth: int) -> str:
    if depth == 0:
        return NEGOTIATION if name.startswith("NEGOTIATE_") else "operation"
    if name.startswith(("MEMCPY_", "COPY_")):
        return COPIES
    if name.startswith(("QUEUE", "WAIT_FOR_")):
        return QUEUE
    return COMMUNICATION if name.startswith(_ENGINES) else OTHER


_ENGINES = ("MPI_", "GLOO_", "NCCL_", "CCL_", "DDL_")


def _bytes(args: Any) -> int | None:
    """Bytes of a tensor; None where the event does not tell them."""
    if not isinstance(args, dict):
        return None
    dtype, shape = args.get("dtype"), args.get("shape")
    if not isinstance(dtype, str) or not isinstance(shape, str) or len(shape) > 200:
        return None
    bits = _BITS.search(dtype[-3:])
    width = 1 if dtype == "bool" else int(bits[0]) // 8 if bits else 0
    return width * math.prod(map(int, re.findall(r"\d{1,18}", shape)))
