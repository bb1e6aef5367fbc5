"""What a benchmark has measured, as JSON or as a chart."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.report.drawing import CHARTS, drawing, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".json", *CHARTS)
"""File types that can be written."""
STYLES = ("o-", "s--", "^:", "v-.")
"""Markers and lines of curves."""
COLUMNS = 3
"""Maximum number of charts with curves beside each other; those with bars, whose names take up room, are stacked."""


@dataclass(frozen=True)
class Figure:
    """One quantity, measured in each pass.

    Attributes:
        series: What was measured: a bar, or a curve over `x`.
        values: Value of each pass.
        panel: Title of the chart to which it belongs.
        x: Its place on the horizontal axis; None for a bar.
    """

    series: str
    values: tuple[float, ...]
    panel: str = ""
    x: float | None = None

    @property
    def median(self) -> float:
        """Median over the passes."""
        return statistics.median(self.values)


@dataclass(frozen=True)
class Findings:
    """All quantities of one benchmark.

    Attributes:
        title: What was measured, and on what.
        unit: Unit of the values.
        figures: The quantities.
        command: Command that repeats the measurement.
        x: Label of the horizontal axis of curves.
    """

    title: str
    unit: str
    figures: tuple[Figure, ...]
    command: str
    x: str = ""

    def write(self, path: Path) -> None:
        """Write JSON or a chart, depending on the suffix of `path`.

        Raises:
            EngineError: A chart was asked for, and matplotlib is not installed, or the chart cannot be written.
            OSError: The JSON file cannot be written.
        """
        if path.suffix == ".json":
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        else:
            self._draw(path)

    def _draw(self, path: Path) -> None:
        panels = list(dict.fromkeys(one.panel for one in self.figures))
        has_curves = self.figures[0].x is not None
        columns = min(len(panels), COLUMNS) if has_curves else 1
        rows = -(-len(panels) // columns)
        bars = max(sum(one.panel == panel for one in self.figures) for panel in panels)
        size = (4 * columns, 3 * rows) if has_curves else (7.5, (1.2 + 0.36 * bars) * rows)
        with drawing(*size, font_size=10) as figure:
            grid = figure.subplots(rows, columns, squeeze=False)
            for axes, panel in zip(grid.flat, panels, strict=False):
                found = [one for one in self.figures if one.panel == panel]
                axes.set_title(panel, fontsize=10)
                (_curves if has_curves else _bars)(axes, found)
                axes.set_xlabel(self.x if has_curves else self.unit)
                if has_curves:
                    axes.set_ylabel(self.unit)
            for axes in list(grid.flat)[len(panels) :]:
                axes.remove()
            save(figure, self.title, path)


def _bars(axes: Axes, found: Sequence[Figure]) -> None:
    """Draw medians as bars, and the range of the passes as lines."""
    medians = [one.median for one in found]
    below = [one.median - min(one.values) for one in found]
    above = [max(one.values) - one.median for one in found]
    names = [one.series for one in found]
    bars = axes.barh(names, medians, xerr=[below, above], color="#56b4e9", ecolor="#333333")
    axes.bar_label(bars, [three_digits(value) for value in medians], padding=4)
    axes.margins(x=0.18)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.6g}" if max(medians) < 1000 else "{x:,.0f}")
    axes.invert_yaxis()


def _curves(axes: Axes, found: Sequence[Figure]) -> None:
    """Draw a curve of medians for each series."""
    names = dict.fromkeys(one.series for one in found)
    for name, style in zip(names, itertools.cycle(STYLES), strict=False):
        points = [(one.x, one.median) for one in found if one.series == name]
        axes.plot(*zip(*points, strict=True), style, label=name, markersize=4)
    places = sorted({int(one.x) for one in found if one.x is not None})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [_short(place) for place in places], fontsize=7)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def three_digits(value: float) -> str:
    """Return `value` with three digits or more, so that slow rates can be told apart."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if 0.1 <= value < 10 else f"{value:.3g}"


def _short(count: int) -> str:
    """Return 4096 as 4K, as a size in bytes is often written."""
    for unit in ("", "K", "M"):
        if count < 1024 or count % 1024:
            return f"{count}{unit}"
        count //= 1024
    return f"{count}G"
