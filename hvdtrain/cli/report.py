"""`hvdtrain report`: write an HTML page about runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from hvdtrain.errors import EngineError
from hvdtrain.replaced_files import replacing


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="File to write.  [default: report.html in the run's folder, or here for several runs]",
)  # fmt: skip
def report(runs: Sequence[Path], output: Path | None) -> None:
    """Write one HTML page about RUNS, each the run_dir of a Trainer.

    The page shows metrics over steps and time, speed, learning rate, how long each worker kept the others waiting,
    events and settings; several runs share each chart. It is a single file without scripts. A run may still be in
    progress. Requires matplotlib.
    """
    from hvdtrain.report.page import page
    from hvdtrain.report.run_record import printable, read_run

    found = [read_run(folder) for folder in runs]
    names = [run.name for run in found]
    if len(set(names)) < len(names):
        found = [replace(run, name=printable(path)) for run, path in zip(found, runs, strict=True)]
    path = output or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    text = page(found)
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror or error}") from error
    click.echo(printable(path))
