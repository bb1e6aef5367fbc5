"""A chart of a timeline's summary: what Horovod did with the time, tensor by tensor, and for whom it waited."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.report.drawing import COLOURS, drawing, save
from hvdtrain.report.timeline import KINDS, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TENSORS_SHOWN = 20
"""Maximum number of bars for tensors: those with the most seconds."""
RANKS_SHOWN = 16
"""Maximum number of bars for ranks: those for which the others waited longest."""
_LONGEST_NAME = 44
_BAR = 0.26  # Inches.


def draw_timeline(summary: Summary, title: str, path: Path) -> None:
    """Draw a summary.

    Args:
        summary: Figures of the timeline.
        title: Title of the chart.
        path: Path of the .png or .svg file to write.

    Raises:
        EngineError: If matplotlib is not installed, or the file cannot be written.
    """
    waits = sorted(summary.waits, key=lambda rank: -summary.waits[rank])[:RANKS_SHOWN]
    rows = [
        len(KINDS) + 1,
        min(len(summary.tensors), TENSORS_SHOWN),
        *([len(waits)] if waits else []),
    ]
    height = sum(_BAR * count + 0.9 for count in rows) + 0.5
    with drawing(9, height, font_size=9) as figure:
        panels = figure.subplots(len(rows), 1, height_ratios=[count + 2.5 for count in rows])
        _draw_whole(panels[0], summary)
        _draw_tensors(panels[1], summary)
        if waits:
            _draw_waits(panels[2], summary, sorted(waits))
        save(figure, title, path)


def _draw_whole(axes: Axes, summary: Summary) -> None:
    """Draw the seconds in which at least one tensor was in an activity of each kind, and those with none."""
    names = [*KINDS, "idle"]
    seconds = [*(summary.busy[kind] for kind in KINDS), summary.seconds - summary.in_flight]
    bars = axes.barh(names, seconds, color=[*COLOURS[: len(KINDS)], "#c4c4c4"])
    parts = [f"{100 * value / (summary.seconds or 1):.1f} %" for value in seconds]
    axes.bar_label(bars, parts, padding=4)
    axes.set_title(
        f"{summary.seconds:.3f} s: share with at least one tensor in each activity", fontsize=9
    )
    axes.set_xlim(0, 1.08 * (summary.seconds or 1))
    _finish(axes)


def _draw_tensors(axes: Axes, summary: Summary) -> None:
    """Draw the seconds of tensors as stacked bars, one colour per kind."""
    shown = summary.tensors[:TENSORS_SHOWN]
    places = range(len(shown))
    left = [0.0] * len(shown)
    for kind, colour in zip(KINDS, COLOURS, strict=False):
        widths = [tensor.seconds[kind] for tensor in shown]
        if any(widths):
            axes.barh(places, widths, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(
        places, [short_name(tensor.name, _LONGEST_NAME) for tensor in shown], fontsize=7
    )
    more = len(summary.tensors) - len(shown)
    axes.set_title("Time per tensor" + (f", without {more:,} others" if more else ""), fontsize=9)
    axes.legend(loc="lower right", fontsize=8)
    _finish(axes)


def _draw_waits(axes: Axes, summary: Summary, ranks: list[int]) -> None:
    """Draw how long the others waited for the rank that was ready last."""
    seconds = [summary.waits[rank] for rank in ranks]
    bars = axes.barh([f"rank {rank}" for rank in ranks], seconds, color="#5b5b5b")
    axes.bar_label(bars, [f"{summary.last[rank]:,} times" for rank in ranks], padding=4)
    axes.set_title("Ranks that were ready last, and how long others waited for them", fontsize=9)
    axes.margins(x=0.12)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.invert_yaxis()
    axes.set_xlabel("seconds")


def short_name(name: str, longest: int) -> str:
    """Return the end of a name, which distinguishes tensors, with "?" for unprintable characters."""
    shown = "".join(c if c.isprintable() else "?" for c in name[-2 * longest :])
    return shown if len(shown) <= longest else f"...{shown[3 - longest :]}"
