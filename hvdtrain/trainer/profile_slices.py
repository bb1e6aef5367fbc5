"""What one rank's profile shows: TensorFlow's operations, its phases and Horovod's collectives, in the trace format.

The format is that of chrome://tracing, which Perfetto reads as well: a process for each rank, and a thread for each
track of slices.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.worker.heartbeat import Span, words_of

_WITHOUT_OPS = ("/host:metadata", "Task Environment")
"""Planes that describe the session."""
_MOST_TENSORS = 50
"""Maximum number of tensors to list for a message of Horovod's."""


class Slice(NamedTuple):
    """One bar of a track.

    Attributes:
        track: Name of the track. Its slices are nested, or do not overlap.
        name: Text on the bar.
        begin: Time of its beginning, in ns since 1970, by this rank's clock.
        end: Time of its end.
        facts: What to show when it is selected.
    """

    track: str
    name: str
    begin: int
    end: int
    facts: dict[str, Any] | None = None


def op_slices(space: Any) -> Iterator[Slice]:
    """Yield the events of TensorFlow's profiler, an XSpace: operations on the host's threads and the GPU's streams."""
    began = _session_began(space)
    lines: Counter[str] = Counter()
    for plane in space.planes:
        if plane.name.startswith(_WITHOUT_OPS):
            continue
        names = {key: m.display_name or m.name for key, m in plane.event_metadata.items()}
        device = (
            "" if plane.name.startswith("/host:") else f"{plane.name.removeprefix('/device:')} "
        )
        for line in plane.lines:
            track = device + (line.display_name or line.name)
            lines[track] += 1
            if lines[track] > 1:  # Python's threads are all called "python".
                track = f"{track} ({lines[track]})"
            begin = 1000 * (began + line.timestamp_ns)
            times = (
                (begin + one.offset_ps, one.duration_ps, one.metadata_id) for one in line.events
            )
            # Rounded alike, so that nested events stay nested.
            yield from nested(
                Slice(track, names[key], at // 1000, (at + duration) // 1000)
                for at, duration, key in times
            )


def nested(slices: Iterable[Slice]) -> Iterator[Slice]:
    """Yield the slices of one track in their order; one that outlasts a slice in which it begins, on a track beside it.

    TensorFlow's profiler has such operations: asynchronous ones, and those of a thread that ended and one that took its
    name.
    """
    tracks: list[
        list[int]
    ] = []  # The ends of the slices that are open at a time, the outermost first.
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        for ends in tracks:
            while ends and ends[-1] <= one.begin:
                ends.pop()
        place = next((n for n, ends in enumerate(tracks) if not ends or one.end <= ends[-1]), None)
        if place is None:
            place = len(tracks)
            tracks.append([])
        tracks[place].append(one.end)
        yield one._replace(track=f"{one.track} #{place + 1}") if place else one


def _session_began(space: Any) -> int:
    """Return the time in ns since 1970 from which the lines of an XSpace count."""
    for plane in space.planes:
        names = {key: metadata.name for key, metadata in plane.stat_metadata.items()}
        for stat in plane.stats:
            if names.get(stat.metadata_id) == "profile_start_time":
                return int(stat.uint64_value or stat.int64_value)
    return 0


def longest(slices: Callable[[], Iterable[Slice]], most: int) -> tuple[list[Slice], int]:
    """Return the longest slices, at most `most` of them, in their order, and the number of the others."""
    durations = np.fromiter((s.end - s.begin for s in slices()), np.int64)
    kept = np.ones(len(durations), bool)
    if len(durations) > most:
        kept[np.argpartition(durations, -most)[:-most]] = False
    found = [one for one, keep in zip(slices(), kept, strict=True) if keep]
    return found, len(durations) - len(found)


def phase_slices(spans: Iterable[Span], clock: int) -> Iterator[Slice]:
    """Yield the phases of this rank.

    Args:
        spans: Phases that were traced.
        clock: What to add to times of CLOCK_MONOTONIC, in ns.
    """
    for phase, detail, begin, end in spans:
        name = f"{words_of(phase)}: {detail}" if detail else words_of(phase)
        yield Slice("phases", name, int(1e9 * begin) + clock, int(1e9 * end) + clock)


@dataclass
class _Message:
    """Tensors that Horovod communicates together.

    Attributes:
        kind: Kind of collective, such as ALLREDUCE.
        begin: Time at which their negotiation began.
        operates: Time at which the operation began.
        first: The first tensor, whose activities stand for those of all.
        parts: Slices of the negotiation and the activities: name, begin, end.
        tensors: Names, dtypes and shapes of the tensors.
    """

    kind: str
    begin: int
    operates: int
    first: int
    end: int = 0
    parts: list[tuple[str, int, int]] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)


def collective_slices(events: Iterable[Mapping[str, Any]]) -> list[Slice]:
    """Return Horovod's messages in the events of a timeline, with their negotiations and activities.

    The operations of tensors that travel together begin in a row. Messages that overlap are put on different tracks.
    """
    names: dict[int, str] = {}
    began = 0
    negotiated: dict[int, int] = {}
    blocks: dict[int, list[tuple[str, int]]] = {}
    messages: list[_Message] = []
    of: dict[int, _Message] = {}
    in_a_row = False
    for event in events:
        phase, tensor, args = event["ph"], event.get("pid", 0), event.get("args", {})
        if phase == "M":
            began = 1000 * args.get("start_time_since_epoch_in_micros", 0) or began
            names[tensor] = args.get("name", names.get(tensor, ""))
            continue
        if phase not in "BE":
            continue
        now, stack = began + 1000 * event["ts"], blocks.setdefault(tensor, [])
        if phase == "B":
            name = event["name"]
            operates = not stack and not name.startswith("NEGOTIATE_")
            if operates:
                begin = negotiated.pop(tensor, now)
                if not in_a_row or messages[-1].kind != name:
                    messages.append(_Message(name, begin, now, tensor))
                of[tensor] = messages[-1]
                of[tensor].begin = min(begin, of[tensor].begin)
            in_a_row = operates
            stack.append((name, now))
            continue
        in_a_row = False
        if not stack:
            continue  # It began before the timeline.
        name, begin = stack.pop()
        if name.startswith("NEGOTIATE_"):
            negotiated[tensor] = begin
        elif stack and of[tensor].first == tensor:
            of[tensor].parts.append((name, begin, now))
        elif not stack:
            of[tensor].end = now
            tensor_facts = f"{args.get('dtype', '')}{args.get('shape', '')}"
            of[tensor].tensors.append(f"{names.get(tensor, '')} {tensor_facts}".strip())
    return list(_on_tracks(sorted((m for m in messages if m.end), key=lambda m: m.begin)))


def _on_tracks(messages: Iterable[_Message]) -> Iterator[Slice]:
    ends: list[int] = []
    for message in messages:
        free = (place for place, end in enumerate(ends) if end <= message.begin)
        place = next(free, len(ends))
        ends[place : place + 1] = [message.end]
        track = "collectives" if place == 0 else f"collectives {place + 1}"
        count = len(message.tensors)
        name = f"{message.kind} of {count} tensors" if count > 1 else message.kind
        facts = {"tensors": message.tensors[:_MOST_TENSORS]}
        yield Slice(track, name, message.begin, message.end, facts)
        yield Slice(track, "negotiation", message.begin, message.operates)
        yield from (Slice(track, *part) for part in message.parts)


def trace_events(rank: int, host: str, slices: Iterable[Slice], origin: int) -> str:
    """Return the events of one rank in the trace format, separated by commas.

    Args:
        rank: Number of the rank.
        host: Name of its host.
        slices: Its slices; tracks are shown in the order in which they occur.
        origin: Time of its clock that is time 0 of the trace.
    """
    threads: dict[str, int] = {}
    lines = [_named(rank, 0, "process", f"rank {rank} ({host})")]
    lines += [_event(rank, 0, "M", "process_sort_index", args={"sort_index": rank})]
    for one in slices:
        if one.track not in threads:
            thread = threads[one.track] = len(threads) + 1
            lines.append(_named(rank, thread, "thread", one.track))
            lines.append(
                _event(rank, thread, "M", "thread_sort_index", args={"sort_index": thread})
            )
        times = {"ts": (one.begin - origin) / 1000, "dur": (one.end - one.begin) / 1000}
        facts = {"args": one.facts} if one.facts else {}
        lines.append(_event(rank, threads[one.track], "X", one.name, **times, **facts))
    return ",\n".join(lines)


def _named(rank: int, thread: int, what: str, name: str) -> str:
    return _event(rank, thread, "M", f"{what}_name", args={"name": name})


def _event(rank: int, thread: int, phase: str, name: str, **more: Any) -> str:
    event = {"ph": phase, "pid": rank, "tid": thread, "name": name, **more}
    return json.dumps(event, separators=(",", ":"))
