"""`hvdtrain top`: watch a training run from another terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hvdtrain.report.run_record import RunRecord

POLL_SECONDS = 1.0


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--once", is_flag=True, help="Print the current state once. The default without a terminal."
)
def top(run_dir: Path, once: bool) -> None:
    """Watch the training run in RUN_DIR, a Trainer's run_dir, until it ends.

    Shows what the run itself shows on a terminal: progress, time left, losses and metrics, speed, the slowest worker
    and memory. For a run that has ended, shows its final state. Ctrl-C stops watching; the training continues.
    """
    from hvdtrain.report.run_record import read_run
    from hvdtrain.view.live_view import is_drawable, plain_line, render
    from hvdtrain.view.region import Region, screen_of

    on_terminal = sys.stdout.isatty()
    follows = on_terminal and is_drawable() and not once
    region = Region()
    try:
        while True:
            run = read_run(run_dir)
            screen = screen_of(sys.stdout)
            screen = replace(screen, colour=screen.colour and on_terminal)
            below = render(run, replace(screen, rows=max(2, screen.rows - 2)))
            lines = [plain_line(f"{run.name}: {_state(run)}", screen), *below]
            if run.occurrences and not run.end:
                last = run.occurrences[-1]
                lines.append(plain_line(f"{last.what}: {last.text}", screen))
            if not follows:
                click.echo("\n".join(line.text for line in lines))
                return
            # Not click.echo, which strips the cursor's codes as well when colours are off.
            sys.stdout.write(region.draw(lines, screen.columns))
            sys.stdout.flush()
            if run.end:
                break
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        pass
    click.echo()


def _state(run: RunRecord) -> str:
    if run.end or run.is_live:
        return run.state
    from hvdtrain.report.page import duration

    return f"no activity for {duration(time.time() - run.clock)} (killed?)"
