"""`hvdtrain timeline`: summarize a Horovod timeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from hvdtrain.report.drawing import check_output
from hvdtrain.report.timeline import Summary, read_timeline
from hvdtrain.report.timeline_advice import advice
from hvdtrain.report.timeline_chart import TENSORS_SHOWN, draw_timeline, short_name

_LONGEST_NAME = 48


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all tensors.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="CHART",
    help="Also draw the summary as a chart (.png or .svg). Requires matplotlib.",
)  # fmt: skip
def timeline(file: Path, as_json: bool, output: Path | None) -> None:
    """Summarize FILE, written by `hvdtrain run --timeline-filename FILE`.

    Shows how long tensors spend in negotiation, queues, copies and communication, how many are fused into one message,
    which rank the others wait for, and what to change. Also reads the timeline of a run that was killed. Times are
    those of rank 0. The number of cycles is shown only with --timeline-mark-cycles.
    """
    if output is not None:
        check_output(output)
    summary = read_timeline(file)
    if output is not None:
        draw_timeline(summary, f"{file}: {next(_whole(summary))}", output)
    if as_json:
        click.echo(json.dumps({**asdict(summary), "advice": advice(summary)}))
        return
    for line in [*_whole(summary), "", *_table(summary), "", *advice(summary)]:
        click.echo(line)
    if output is not None:
        click.echo(f"wrote {output}")


def _whole(summary: Summary) -> Iterator[str]:
    yield (
        f"{summary.seconds:.3f} s, {summary.operations:,} operations on {len(summary.tensors):,} tensors, "
        f"{summary.bytes / 1e6:,.3f} MB"
    )
    for kind, seconds in summary.busy.items():
        if seconds:
            yield f"  {kind:<14}{seconds:>10.3f} s {_percent(seconds, summary):>6}"
    rest = summary.seconds - summary.in_flight
    yield f"  {'idle':<14}{rest:>10.3f} s {_percent(rest, summary):>6}"
    messages = sum(summary.messages.values())
    if messages:
        mean = sum(size * count for size, count in summary.messages.items()) / messages
        yield (
            f"{messages:,} messages of {mean:.3g} tensors and {summary.bytes / messages / 1e3:,.1f} kB on average, "
            f"at most {max(summary.messages):,} tensors"
        )
    if summary.cycle_seconds is not None:
        yield (
            f"{summary.cycles:,} cycles of {1e3 * summary.cycle_seconds:.3g} ms on average; "
            f"{summary.cycles_used:,} sent something"
        )
    if summary.last:
        shown = sorted(summary.last, key=lambda rank: -summary.last[rank])[:8]
        ranks = ", ".join(
            f"rank {rank} {summary.last[rank]:,} times ({summary.waits[rank]:.3g} s)"
            for rank in shown
        )
        yield (
            f"Last of {summary.ranks} ranks, in the {sum(summary.last.values()):,} negotiations with all ranks: {ranks}"
        )
    if summary.unfinished:
        yield f"Unfinished operations: {summary.unfinished:,}"
    if summary.damaged:
        yield f"Unreadable places in the file: {summary.damaged:,}"


def _table(summary: Summary) -> Iterator[str]:
    kinds = list(summary.busy)
    yield f"{'tensor':<{_LONGEST_NAME}} {'times':>7} {'MB':>9}" + "".join(
        f" {kind + ' s':>15}" for kind in kinds
    )
    for tensor in summary.tensors[:TENSORS_SHOWN]:
        name = short_name(tensor.name, _LONGEST_NAME)
        yield (
            f"{name:<{_LONGEST_NAME}} {tensor.operations:>7,} {tensor.bytes / 1e6:>9,.3f}"
            + "".join(f" {tensor.seconds[kind]:>15.3f}" for kind in kinds)
        )
    more = len(summary.tensors) - TENSORS_SHOWN
    if more > 0:
        yield f"{more:,} more tensors: see --json"


def _percent(seconds: float, summary: Summary) -> str:
    return f"{100 * seconds / summary.seconds:.1f} %" if summary.seconds else "-"
