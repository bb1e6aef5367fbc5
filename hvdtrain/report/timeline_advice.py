"""Rules that suggest changes to a run from the summary of its timeline, and state the figures they are based on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from hvdtrain.report.timeline import COMMUNICATION, COPIES, NEGOTIATION, Summary

MOST = 3
"""Maximum number of sentences; rules are in descending order of their usual gain."""
NOTICEABLE = 0.1
"""Minimum share of the whole time that is worth a change."""


def advice(summary: Summary) -> list[str]:
    """Return suggestions for the run, at most MOST sentences."""
    return list(islice(_rules(summary), MOST)) or [
        f"Horovod was busy for {_share(summary.in_flight, summary)}, and no figure stands out: nothing to change."
    ]


def _rules(summary: Summary) -> Iterator[str]:
    whole = summary.seconds
    negotiation, copies, communication = (
        summary.busy[kind] for kind in (NEGOTIATION, COPIES, COMMUNICATION)
    )
    messages = sum(summary.messages.values())
    cycle = summary.cycle_seconds
    slowest = max(summary.last, key=lambda rank: summary.waits[rank], default=None)
    if slowest is not None and summary.waits[slowest] >= max(
        NOTICEABLE * whole, 0.6 * sum(summary.waits.values())
    ):
        yield (
            f"Rank {slowest} came last in {summary.last[slowest]:,} of {sum(summary.last.values()):,} negotiations, "
            f"and the others waited {summary.waits[slowest]:.3g} s for it: check its input, callbacks and host."
        )
    elif negotiation >= 0.3 * whole:
        mean = sum(tensor.seconds[NEGOTIATION] for tensor in summary.tensors) / max(
            1, summary.operations
        )
        if cycle is not None and mean <= 3 * cycle:
            yield (
                f"Negotiation takes {_share(negotiation, summary)}, on average {1e3 * mean:.3g} ms, about as long as "
                f"a cycle of {1e3 * cycle:.3g} ms: try --cycle-time-ms {1e3 * cycle / 4:.2g} (HOROVOD_CYCLE_TIME)."
            )
        else:
            yield (
                f"Negotiation takes {_share(negotiation, summary)}, on average {1e3 * mean:.3g} ms, and no single rank "
                "is usually the last: a different rank is slow each time (shared cores, examples of different "
                "lengths, input)."
            )
    if copies >= max(NOTICEABLE * whole, 0.5 * communication):
        yield (
            f"Copies into and out of the fusion buffer take {copies:.3g} s, communication {communication:.3g} s: try a "
            "smaller --fusion-threshold-mb; a tensor that is not fused with others is not copied."
        )
    if communication >= 0.3 * whole and messages:
        mean_bytes = summary.bytes / messages
        if mean_bytes < 2**16:
            yield (
                f"Communication takes {_share(communication, summary)} in {messages:,} messages of "
                f"{mean_bytes / 1e3:.3g} kB on average: fuse more tensors into each, with a longer --cycle-time-ms or "
                "DistributedOptimizer(groups=1)."
            )
        else:
            yield (
                f"Communication takes {_share(communication, summary)}, at {summary.bytes / communication / 1e9:.2g} "
                "GB/s: send less, with compression=hvd.Compression.bf16 or gradient accumulation, and compare with "
                "hvdtrain bench collectives."
            )


def _share(seconds: float, summary: Summary) -> str:
    return f"{seconds:.3g} of {summary.seconds:.3g} s"
