"""Summarises Horovod's timeline: where the time of each tensor went, and which rank the others waited for.

Rank 0 writes the timeline (see "Horovod Timeline" in Horovod's documentation). Each collective of a tensor is a
negotiation, with a mark for each rank that becomes ready, followed by the operation, which consists of activities:
waiting in the queue, copies into and out of the fusion buffer, communication. Times are those of rank 0.

Fused tensors share their activities, and a negotiation overlaps with the operations of other tensors. So times summed
over tensors can exceed the whole; `Summary.busy` counts each moment once per kind.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.timeline_events import Events

NEGOTIATION, QUEUE, COPIES, COMMUNICATION, OTHER = KINDS = (
    "negotiation", "queue", "copies", "communication", "other",
)  # fmt: skip
"""Kinds of activity that a tensor's time is divided into."""
MOST_TENSORS = 10_000
"""Maximum number of tensors with their own figures: unnamed collectives may create new names in every step."""
OTHERS = "(other tensors)"
_MOST_OPEN = 100_000
"""Maximum number of tensors with unfinished activities."""
_DEEPEST = 3
_LATEST = 1e15
"""Maximum plausible time stamp in microseconds: about thirty years."""
_BITS = re.compile(r"\d+$")


@dataclass
class TensorTimes:
    """Times of one tensor, summed over its operations.

    Attributes:
        name: Name of the tensor.
        operations: Number of completed operations.
        bytes: Number of bytes of these operations, as far as the timeline shows them.
        seconds: Kind of activity -> seconds.
    """

    name: str
    operations: int = 0
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))


@dataclass
class Summary:
    """Figures of a timeline.

    Attributes:
        seconds: Time from the first to the last event, in seconds.
        busy: Kind of activity -> seconds in which at least one tensor was in it; kinds overlap.
        in_flight: Seconds in which at least one tensor was in any activity.
        tensors: Times of tensors, in descending order of their sum.
        operations: Number of completed operations, counted per tensor.
        bytes: Number of bytes of these operations.
        messages: Number of tensors fused in a message -> number of such messages.
        cycles: Number of cycles of Horovod's background thread; 0 unless the timeline marks them.
        cycles_used: Number of cycles in which communication began.
        cycle_seconds: Mean length of a cycle; None with fewer than two marks.
        last: Rank -> number of negotiations in which it was ready last, of those that show all ranks.
        waits: Rank -> seconds from the first rank's readiness to its own, in these negotiations; overlaps count once.
        ranks: Number of ranks seen.
        unfinished: Number of tensors with unfinished activities at the end.
        damaged: Number of places in the file that could not be read.
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
    """Return a summary of the timeline in `path`, in memory that does not depend on its length.

    Args:
        path: Path of the file, which may be cut off anywhere.

    Raises:
        UsageError: If the file cannot be read, is not a timeline of Horovod, or holds no operation.
    """
    events = Events(path)
    tally = _Tally()
    for event in events:
        if not tally.add(event):
            events.damaged += 1
        if len(tally.open) > _MOST_OPEN:
            raise events.refused("not a Horovod timeline: too many operations never end")
    summary = tally.summary(events.damaged)
    if not summary.tensors:
        raise UsageError(f"{path} contains no Horovod operations")
    return summary


@dataclass
class _Block:
    """An unfinished activity of a tensor.

    Attributes:
        kind: Kind of activity, or "operation" for the whole operation.
        begin: Time of its beginning, in seconds.
        ready: Rank and time in seconds of each readiness mark, in order; in negotiations only.
    """

    kind: str
    begin: float
    ready: list[tuple[int, float]] = field(default_factory=list)


class _Busy:
    """Measures the seconds in which at least one activity was in progress."""

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
    """Accumulates the figures of events, given in order.

    Attributes:
        open: Unfinished activities by tensor, the innermost last.
    """

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
        self._waits: dict[tuple[int, int], tuple[float, float]] = {}  # Seconds; latest end.

    def add(self, event: dict[str, Any]) -> bool:
        """Process an event; return whether it is a valid one of Horovod's."""
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
            # A timeline restarted in the same file numbers its tensors from the beginning.
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
        """Count the message that ends here: its tensors' communications begin in a row, with no event in between."""
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
        """Record the last rank of a negotiation and the wait for it; waits that overlap count once."""
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
        """Return the summary; `damaged` is the number of places that could not be read."""
        self._close_message()
        unfinished = len(self.open)
        for tensor in list(self.open):
            # The file is cut off: count unfinished activities until its end.
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
    """Return the number of bytes of a tensor; None if the event does not show its dtype and shape."""
    if not isinstance(args, dict):
        return None
    dtype, shape = args.get("dtype"), args.get("shape")
    if not isinstance(dtype, str) or not isinstance(shape, str) or len(shape) > 200:
        return None
    bits = _BITS.search(dtype[-3:])
    width = 1 if dtype == "bool" else int(bits[0]) // 8 if bits else 0
    return width * math.prod(map(int, re.findall(r"\d{1,18}", shape)))
