"""The charts of a report, as SVG: curves of runs over steps or time, and seconds of each worker."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import TYPE_CHECKING, Any

from hvdtrain.report.drawing import COLOURS, drawing
from hvdtrain.report.run_record import OUTSIDE, Point, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 400
"""Maximum number of points of a curve, so that the page of a long run stays small; a screen shows no more."""
WIDTH, HEIGHT = 5.0, 3.1
"""Size in inches; a page shows charts at about this size, so that their text is as large as the text around them."""
RANKS_SHOWN = 32
"""Maximum number of rows in the chart of workers: those with the most seconds outside of steps."""


@dataclass(frozen=True)
class Chart:
    """A drawing.

    Attributes:
        title: Title of the chart.
        svg: An <svg> element.
        text: Summary of the chart for a reader who cannot see it.
    """

    title: str
    svg: str
    text: str


@dataclass(frozen=True)
class Over:
    """The horizontal axis of a chart.

    Attributes:
        label: Label of the axis.
        of: Function that returns a point's place on the axis.
    """

    label: str
    of: Callable[[Point], float]


STEPS = Over("step", lambda one: one.step)


def over_time(runs: Sequence[RunRecord]) -> Over:
    """Return an axis of training time, in the unit that fits the longest run."""
    longest = max(run.seconds for run in runs)
    unit, size = next(
        (u, s) for u, s in (("h", 3600), ("min", 60), ("s", 1)) if longest >= 2 * s or s == 1
    )
    return Over(f"training time ({unit})", lambda one: one.seconds / size)


def metric_chart(runs: Sequence[RunRecord], name: str, over: Over) -> Chart:
    """Draw a metric of all runs: a thin line within epochs, dots at their ends, dashes for validation."""

    def draw(axes: Axes) -> None:
        for run, colour in _coloured(runs):
            within = [(over.of(w), w.values[name]) for w in run.windows if name in w.values]
            _line(axes, within, color=colour, linewidth=0.8, alpha=0.5)
            for key, style, word in ((name, "-", "training"), (f"val_{name}", "--", "validation")):
                ends = [(over.of(e), e.values[key]) for e in run.epochs if key in e.values]
                marker = "o" if len(ends) <= 30 else ""
                label = f"{run.name}, {word}" if len(runs) > 1 else word
                _line(axes, ends, color=colour, linestyle=style, marker=marker, label=label)

    text = "; ".join(filter(None, (_told(run, name) for run in runs)))
    return _chart(f"{name} by {over.label}", draw, over.label, text)


def speed_chart(runs: Sequence[RunRecord], over: Over) -> Chart:
    """Draw the examples per second of all workers together."""

    def draw(axes: Axes) -> None:
        for run, colour in _coloured(runs):
            points = [(over.of(w), w.examples_per_second) for w in run.windows]
            _line(axes, points, color=colour, label=run.name if len(runs) > 1 else None)
        axes.set_ylim(bottom=0)

    rates = [(run.name, [w.examples_per_second for w in run.windows]) for run in runs]
    text = "; ".join(f"{name}: median {median_high(found):,.0f}" for name, found in rates if found)
    return _chart("examples per second", draw, over.label, text)


def rate_chart(runs: Sequence[RunRecord]) -> Chart | None:
    """Draw the learning rate; return None if no run has one."""
    found = [
        (r, [(w.step, w.learning_rate) for w in r.windows if w.learning_rate is not None])
        for r in runs
    ]
    if not any(points for _, points in found):
        return None

    def draw(axes: Axes) -> None:
        for (run, points), (_, colour) in zip(found, _coloured(runs), strict=True):
            _line(axes, points, color=colour, label=run.name if len(runs) > 1 else None)

    text = "; ".join(
        f"{run.name}: {points[0][1]:.3g} to {points[-1][1]:.3g}" for run, points in found if points
    )
    return _chart("learning rate", draw, STEPS.label, text)


def workers_chart(run: RunRecord) -> Chart | None:
    """Draw each worker's seconds outside of steps, in which the others wait; return None with one worker."""
    sums = seconds_of_ranks(run)
    if not sums:
        return None
    ranks = sorted(range(len(sums)), key=lambda r: -sum(sums[r].values()))[:RANKS_SHOWN]
    shown = sorted(ranks)

    def draw(axes: Axes) -> None:
        left = [0.0] * len(shown)
        for (phase, word), colour in zip(OUTSIDE.items(), COLOURS, strict=False):
            widths = [sums[rank][phase] for rank in shown]
            axes.barh([str(rank) for rank in shown], widths, left=left, color=colour, label=word)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_ylabel("worker (rank)")

    slowest = ranks[0]
    phase = max(OUTSIDE, key=lambda name: sums[slowest][name])
    text = (
        f"worker {slowest} spent the most: {sum(sums[slowest].values()):,.1f} s, of which "
        f"{sums[slowest][phase]:,.1f} s {OUTSIDE[phase]}"
    )
    return _chart(f"{run.name}: seconds outside of training steps", draw, "seconds", text)


def seconds_of_ranks(run: RunRecord) -> list[dict[str, float]]:
    """Return the seconds of each rank in each phase of OUTSIDE, one dict per rank.

    They are summed over the epochs trained by as many workers as the last one.
    """
    epochs = [epoch for epoch in run.epochs if epoch.ranks]
    if not epochs:
        return []
    count = len(epochs[-1].ranks["seconds"])
    alike = [epoch.ranks for epoch in epochs if len(epoch.ranks["seconds"]) == count]
    return [
        {phase: sum(one[phase][rank] for one in alike) for phase in OUTSIDE}
        for rank in range(count)
    ]


def _coloured(runs: Sequence[RunRecord]) -> list[tuple[RunRecord, str]]:
    return [(run, COLOURS[number % len(COLOURS)]) for number, run in enumerate(runs)]


def _line(axes: Axes, points: Sequence[tuple[float, Any]], **style: Any) -> None:
    if points:
        every = -(-len(points) // MOST_POINTS)
        # Keep the last point, which shows the present state of the run.
        kept = [*points[:-1:every], points[-1]]
        axes.plot(*zip(*kept, strict=True), **style | {"label": _shown(style.get("label"))})


def _shown(label: str | None) -> str | None:
    """Return a label that matplotlib shows in the legend: it leaves out those that begin with "_"."""
    return f"\u200b{label}" if label is not None and label.startswith("_") else label


def _told(run: RunRecord, name: str) -> str:
    words = []
    for key, word in ((name, "training"), (f"val_{name}", "validation")):
        found = [e.values[key] for e in run.epochs if key in e.values]
        if found:
            words.append(f"{word} {found[0]:.4g} to {found[-1]:.4g}")
    return f"{run.name}: {', '.join(words)}" if words else ""


def _chart(title: str, draw: Callable[[Axes], None], label: str, text: str) -> Chart:
    settings: Any = {
        "svg_fonttype": "none",  # Text stays text: small, selectable, in the page's font.
        "svg_hashsalt": title,  # The same run gives the same page.
        "font_size": 11,
        "axes_grid": True,
        "grid_color": "#e4e4e4",
        "legend_fontsize": 10,
    }
    with drawing(WIDTH, HEIGHT, **settings) as figure:
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(label)
        if label == STEPS.label:
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            # Outside of the axes, where it hides nothing.
            figure.legend(loc="outside upper left", ncols=3)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return Chart(title, _inline(drawn.getvalue(), title), text)


def _inline(svg: str, title: str) -> str:
    """Return only the <svg> element, scalable, with ids that no other chart on the page has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([^;\"]*?)'[^\"]*?'[^;\"]*", r"font: \1system-ui, sans-serif", svg)
    mark = re.sub(r"\W+", "-", title)
    svg = re.sub(r'\bid="', f'id="{mark}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{mark}-", svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)
