"""Formats the state of a run as lines that fit a terminal.

No table library is used: these lines cost rank 0 a tenth of a millisecond, a library's tables a few milliseconds.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from hvdtrain.report.run_record import PassProgress, RunRecord, Slowest

BARS = "▁▂▃▄▅▆▇█"
WIDEST_BAR, WIDEST_CURVE, WIDEST_NAME = 40, 24, 20
MOST_METRICS = 8
LEAST_BESIDE = 76
"""Minimum number of columns to show validation values beside those of training."""
LEAST_LOST = 0.01
"""Minimum delay of the slowest worker to name it, as a share of the epoch."""
_PHASES = {"input": "waiting for data", "callbacks": "in callbacks", "saving": "saving"}
_MEMORY = {"host": "memory", "gpu": "GPU memory"}
_STYLES = {"": "", "dim": "2", "bold": "1", "bar": "36", "bad": "31", "slow": "33"}

Part = tuple[str, str]
"""Text and the name of its style."""


@dataclass(frozen=True)
class Screen:
    """Size and capabilities of a terminal.

    Attributes:
        columns: Width in character cells.
        rows: Height in lines.
        colour: Whether to use colours.
        blocks: Whether it shows characters other than ASCII.
    """

    columns: int
    rows: int
    colour: bool = True
    blocks: bool = True

    @property
    def width(self) -> int:
        """Cells available in a row; leaves room for the ^C that a terminal prints at the cursor."""
        return max(1, self.columns - 3)


@dataclass(frozen=True)
class Line:
    """One row of the view.

    Attributes:
        text: Text with colour codes.
        cells: Width in character cells.
    """

    text: str
    cells: int


def is_drawable(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the terminal named by TERM can move its cursor."""
    return environ.get("TERM", "") not in ("", "dumb", "unknown")


def render(run: RunRecord, screen: Screen) -> list[Line]:
    """Return the rows of the view, fewer than the terminal has; none before the first step."""
    rows: list[list[Part]] = []
    if run.place is not None:
        has_time = run.seconds_left is not None and not run.end
        left = f"{duration(run.seconds_left or 0)} left" if has_time else ""
        rows.append(_bar(run.place.title, run.done, left, screen))
        rows.append(_facts(run, run.place, screen))
    if run.other_pass is not None:
        rows.append(_aside(run.other_pass, run.place is None, screen))
    if run.place is not None:
        slowest = _slowest(run.slowest, screen)
        room = screen.rows - 1 - len(rows) - len(slowest)
        rows += _metrics(run, run.place, screen)[: max(0, room)]
        rows += slowest
    return [_line(row, screen) for row in rows[: max(1, screen.rows - 1)]]


def plain_line(text: str, screen: Screen) -> Line:
    """Return a row of plain text, cut to the width of the terminal."""
    return _line([(text, "")], screen)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most `width` characters, each the mean of consecutive values; nan and inf are left out."""
    values = [one for one in values if math.isfinite(one)]
    count = min(width, len(values))
    if count <= 0:
        return ""
    ends = [len(values) * number // count for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _bar(title: str, done: float | None, left: str, screen: Screen) -> list[Part]:
    if done is None:
        return [(title, "bold")]
    right = f" {math.floor(100 * done):3d}%" + (f"  {left}" if left else "")
    width = min(WIDEST_BAR, screen.width - 1 - cell_len(title) - len(right))
    if width < 5:
        return [(title, "bold"), (right, "")]
    full = round(width * done)
    on, off = ("━", "─") if screen.blocks else ("#", "-")
    return [(f"{title} ", "bold"), (on * full, "bar"), (off * (width - full), "dim"), (right, "")]


def _facts(run: RunRecord, place: PassProgress, screen: Screen) -> list[Part]:
    of = "" if place.steps is None else f"/{place.steps:,}"
    memory = [f"{_MEMORY.get(name, name)} {_size(size)}" for name, size in run.memory.items()]
    workers = [f"{run.workers} workers"] if run.workers > 1 else []
    speed = f"{place.examples_per_second:,.0f} examples/s"
    return _fitting([f"step {place.step:,}{of}", speed, *workers, *memory], screen)


def _aside(place: PassProgress, alone: bool, screen: Screen) -> list[Part]:
    done = None if not place.steps else min(1.0, place.step / place.steps)
    of = "" if place.steps is None else f"/{place.steps:,}"
    words = f"{place.step:,}{of}  {place.examples_per_second:,.0f} examples/s"
    # During training, the only bar is the training's.
    row = _bar(place.title, done, words, screen) if alone else [(f"{place.title} {words}", "dim")]
    return row + ([] if done is not None else [(f"  {words}", "")] if alone else [])


def _metrics(run: RunRecord, place: PassProgress, screen: Screen) -> list[list[Part]]:
    """Return a row for each metric (name, current value, curve), with its validation values beside it or below."""
    own = [name for name in place.values if not name.startswith("val_")][:MOST_METRICS]
    if not own:
        return []
    ends = {
        name: [e.values[f"val_{name}"] for e in run.epochs if f"val_{name}" in e.values]
        for name in own
    }
    # Below, validation's names are four characters ("val_") longer.
    beside = screen.columns >= LEAST_BESIDE
    longer = 0 if beside or not any(ends.values()) else 4
    name_width = min(WIDEST_NAME, max(map(cell_len, own)) + longer)
    room = screen.width - 11 - name_width
    curve = min(WIDEST_CURVE, room // 2 - 10 if beside else room) if screen.blocks else 0
    rows = []
    for name in own:
        within = [w.values[name] for w in run.windows if name in w.values]
        row = _metric(set_cell_size(name, name_width), place.values[name], within, curve)
        rows.append(row)
        if ends[name] and beside:
            gap = " " * max(0, curve - len(within))
            row += _metric(f"{gap}  val", ends[name][-1], ends[name], curve)
        elif ends[name]:
            label = set_cell_size(f"val_{name}", name_width)
            rows.append(_metric(label, ends[name][-1], ends[name], curve))
    return rows


def _metric(label: str, value: float | None, values: Sequence[float], curve: int) -> list[Part]:
    bad = value is None or math.isnan(value)
    number, style = ("nan", "bad") if bad else (f"{value:.4g}", "bold")
    return [(f"{label} ", "dim"), (f"{number:>9}", style), (f" {sparkline(values, curve)}", "bar")]


def _slowest(slowest: Slowest | None, screen: Screen) -> list[list[Part]]:
    if slowest is None or slowest.share < LEAST_LOST:
        return []
    behind = f"{slowest.seconds:.1f} s behind ({100 * slowest.share:.0f}%)"
    words = [f"slowest: rank {slowest.rank}", behind, _PHASES[slowest.phase], "in the last epoch"]
    return [_fitting(words, screen, "slow")]


def _fitting(words: Iterable[str], screen: Screen, style: str = "") -> list[Part]:
    """Return as many of the first words as fit in a row."""
    text = ""
    for word in words:
        longer = f"{text}  {word}" if text else word
        if text and cell_len(longer) > screen.width:
            break
        text = longer
    return [(text, style)]


def _line(parts: Iterable[Part], screen: Screen) -> Line:
    """Join the parts, cut to the width of a row, so that the terminal does not wrap it."""
    text, room = "", screen.width
    for part, style in parts:
        kept = "".join(c for c in part if c.isprintable())
        kept = set_cell_size(kept, min(cell_len(kept), room))
        room -= cell_len(kept)
        code = _STYLES[style] if screen.colour else ""
        text += f"\x1b[{code}m{kept}\x1b[0m" if code and kept else kept
    return Line(text, screen.width - room)


def duration(seconds: float) -> str:
    """Format a duration, such as 0:42, 3:07 or 26:03:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
