"""A report as one self-contained HTML page, without scripts or network requests."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvdtrain.report.charts import (
    STEPS,
    Chart,
    metric_chart,
    over_time,
    rate_chart,
    speed_chart,
    workers_chart,
)
from hvdtrain.report.run_record import Occurrence, RunRecord

MOST_METRICS = 12
"""Maximum number of metrics with charts; the tables list all."""
MOST_OCCURRENCES = 200
"""Maximum number of rows in the table of events, and of epochs per run; the latest are shown."""
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1280px; padding: 0 16px 48px; color: #1c1c1c; }
h1 { font-size: 1.6rem; margin: 24px 0 4px; } h2 { font-size: 1.2rem; margin: 36px 0 12px; }
.grid { display: grid; gap: 20px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; } svg { display: block; width: 100%; height: auto; }
figure p { margin: 2px 0 0; font-size: .875rem; color: #555; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 14px 4px 0; vertical-align: top; border-bottom: 1px solid #e4e4e4; }
td.text { min-width: 14rem; overflow-wrap: anywhere; } .differs { background: #fff3d6; } summary { cursor: pointer; }
"""


def page(runs: Sequence[RunRecord]) -> str:
    """Return the report as HTML.

    Args:
        runs: Runs to report on, at least one, with different names.
    """
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics()))[:MOST_METRICS]
    time_axis = over_time(runs)
    curves = [metric_chart(runs, name, over) for over in (STEPS, time_axis) for name in metrics]
    curves += filter(None, [speed_chart(runs, time_axis), rate_chart(runs)])
    title = ", ".join(run.name for run in runs)
    sections = [
        f"<h1>{_text(title)}</h1>",
        _summary(runs),
        _charts("Curves", curves),
        _charts("Workers", filter(None, map(workers_chart, runs))),
        _occurrences(runs),
        _epochs(runs),
        _settings(runs),
    ]
    body = "\n".join(filter(None, sections))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{_text(title)}</title><style>{_STYLE}</style></head>'
        f"<body>\n{body}\n</body></html>\n"
    )


def _summary(runs: Sequence[RunRecord]) -> str:
    heads = ["run", "state", "workers", "epochs", "steps", "training time", "checkpoints"]
    last = {name: None for run in runs for epoch in run.epochs[-1:] for name in epoch.values}
    rows = []
    for run in runs:
        values = run.epochs[-1].values if run.epochs else {}
        rows.append(
            [
                run.name,
                run.state,
                run.workers,
                f"{run.epochs[-1].number if run.epochs else 0} of {run.epochs_planned}",
                f"{run.steps:,}",
                duration(run.seconds),
                run.checkpoints,
                *_numbers(values, last),
            ]
        )
    return _table([*heads, *last], rows)


def _charts(title: str, charts: Iterable[Chart]) -> str:
    figures = [
        f"<figure><figcaption>{_text(one.title)}</figcaption>{one.svg}<p>{_text(one.text)}</p></figure>"
        for one in charts
    ]
    return f'<h2>{title}</h2>\n<div class="grid">{"".join(figures)}</div>' if figures else ""


def _occurrences(runs: Sequence[RunRecord]) -> str:
    found: list[tuple[RunRecord, Occurrence]] = [
        (run, one) for run in runs for one in run.occurrences
    ]
    found.sort(key=lambda pair: pair[1].clock)
    more = len(found) - MOST_OCCURRENCES
    rows = [
        [
            _clock(one.clock),
            *([run.name] if len(runs) > 1 else []),
            f"{one.step:,}",
            one.what,
            one.text,
        ]
        for run, one in found[-MOST_OCCURRENCES:]
    ]
    if not rows:
        return ""
    heads = ["time", *(["run"] if len(runs) > 1 else []), "after step", "event", ""]
    left_out = f"<p>{more} earlier ones are left out.</p>" if more > 0 else ""
    return f"<h2>Events</h2>{left_out}{_table(heads, rows)}"


def _epochs(runs: Sequence[RunRecord]) -> str:
    tables = []
    for run in runs:
        names = list(dict.fromkeys(name for epoch in run.epochs for name in epoch.values))
        rows = [
            [e.number, f"{e.step:,}", duration(e.seconds), *_numbers(e.values, names)]
            for e in run.epochs[-MOST_OCCURRENCES:]
        ]
        if rows:
            table = _table(["epoch", "step", "time", *names], rows)
            tables.append(f"<details><summary>{_text(run.name)}: epochs</summary>{table}</details>")
    return f"<h2>Values</h2>{''.join(tables)}" if tables else ""


def _settings(runs: Sequence[RunRecord]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return ""
    rows = []
    for key in keys:
        values = [_value(run.config.get(key)) for run in runs]
        mark = ' class="differs"' if len(set(values)) > 1 else ""
        cells = "".join(f'<td class="text">{_text(value)}</td>' for value in values)
        rows.append(f"<tr{mark}><th scope=row>{_text(key)}</th>{cells}</tr>")
    head = "".join(f"<th scope=col>{_text(run.name)}</th>" for run in runs)
    table = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<h2>Settings</h2><div class="wide">{table}</div>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th scope=col>{_text(name)}</th>" for name in heads)
    lines = "".join(
        "<tr>" + "".join(f"<td{_wide(cell)}>{_text(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _numbers(values: Mapping[str, float], names: Iterable[str]) -> list[str]:
    return [f"{values[name]:.4g}" if name in values else "" for name in names]


def _wide(cell: object) -> str:
    return ' class="text"' if len(str(cell)) > 30 else ""


def _value(value: Any) -> str:
    if isinstance(value, dict) and "class_name" in value:
        settings = ", ".join(
            f"{k}={v}" for k, v in dict(value.get("config") or {}).items() if v is not None
        )
        return f"{value['class_name']}({settings})"
    return "" if value is None else str(value)


def _text(value: object) -> str:
    return html.escape(str(value))


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def duration(seconds: float) -> str:
    """Format seconds, such as "3 h 20 min", "1 min 5 s" or "12.3 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
