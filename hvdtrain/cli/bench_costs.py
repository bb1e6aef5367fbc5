"""The `hvdtrain bench` commands for what something costs: start-up, memory, the Trainer, its checkpoints."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import click

from hvdtrain.bench.checkpoint_cost import CheckpointCost, measure_checkpoint_cost
from hvdtrain.bench.figures import Figure
from hvdtrain.bench.measurement import Comparison, in_passes, medians
from hvdtrain.bench.memory import CASES, HEADER, measure_peaks, parameters_of, row
from hvdtrain.bench.overhead import DATA, measure_overhead
from hvdtrain.bench.startup import measure_startup
from hvdtrain.cli.bench_options import (
    BATCH_SIZES,
    CONTROLLER,
    OUTPUT,
    SMALL,
    announce,
    finish,
    launcher,
    line,
    measured,
    pair,
    workers,
)
from hvdtrain.launch.installed_horovod import choose_controller, find_mpirun, installed_controllers


@click.command()
@click.option(
    "--case", "names", type=click.Choice(list(CASES)), multiple=True,
    help="Strategy and number of workers. May be repeated.  [default: all]",
)  # fmt: skip
@click.option(
    "--width", type=click.IntRange(16), default=1024, show_default=True, help="Width of the layers."
)
@click.option(
    "--blocks", type=click.IntRange(4), default=6, show_default=True,
    help="Blocks of two layers, with 8 width^2 parameters.",
)  # fmt: skip
@CONTROLLER
@OUTPUT
@click.pass_context
def memory(
    context: click.Context, names: tuple[str, ...], width: int, blocks: int, controller: str
) -> None:
    """Peak memory of a rank with Adam."""
    launch, chosen = launcher(controller)
    parameters = parameters_of(width, blocks)
    title = announce(
        f"{parameters / 1e6:.1f} million parameters, float32, Adam, over {chosen}; MB per rank"
    )
    click.echo(line(HEADER))
    bars = []
    for name in names or CASES:
        peaks = measure_peaks(CASES[name], launch, width, blocks)
        click.echo(line(row(CASES[name], parameters, peaks)))
        bars.append(Figure(name, (max(peaks) / 1e6,)))
    finish(context, title, "peak memory in MB", bars)


@click.command()
@workers(1)
@measured
def startup(context: click.Context, np: int, controller: str, passes: int) -> None:
    """Start-up time against plain horovodrun."""
    chosen = choose_controller(controller, installed_controllers(), find_mpirun())
    title = announce(f"start-up of {np} workers over {chosen}")
    done: list[Comparison] = []
    for one in measure_startup(np, chosen, passes):
        done.append(one)
        click.echo(f"  hvdtrain run {one.measured:6.2f} s   horovodrun {one.reference:6.2f} s")
    bare, ours, _ = medians(done)
    click.echo(f"median of {passes}: hvdtrain run {ours:.2f} s, horovodrun {bare:.2f} s")
    finish(context, title, "seconds", pair("horovodrun", "hvdtrain run", done))


@click.command()
@workers(1)
@click.option(
    "--model", "models", type=click.Choice(list(BATCH_SIZES)), multiple=True,
    help="Model to train. May be repeated.  [default: all]",
)  # fmt: skip
@click.option("--data", "kinds", type=click.Choice(DATA), multiple=True, help="[default: both]")
@click.option(
    "--adopt", is_flag=True, help="fit of an ordinary script, as under hvdtrain run --adopt."
)
@measured
def overhead(
    context: click.Context, np: int, models: tuple[str, ...], kinds: tuple[str, ...], controller: str, passes: int,
    adopt: bool,
) -> None:  # fmt: skip
    """Step time of the Trainer against Keras's fit.

    Each worker has one core. With several workers fit uses hvdtrain.keras.DistributedOptimizer, or --adopt.
    """
    launch, chosen = launcher(controller)
    title = announce(f"{np} workers over {chosen}, medians of {passes}")
    bars: list[Figure] = []
    for model in models or SMALL:
        for kind in kinds or DATA:
            done = measure_overhead(model, kind, BATCH_SIZES[model], np, passes, launch, adopt)
            fit, trainer, _ = medians(done)
            ratio = in_passes([one.ratio for one in done])
            click.echo(
                f"  {model:>8}, {kind:>7}: fit {fit:7.2f} ms, Trainer {trainer:7.2f} ms; ratio {ratio}"
            )
            bars += pair("fit", "Trainer", done, f"{model}, {kind}")
    finish(context, title, "ms per step", bars)


@click.command()
@workers(1)
@click.option(
    "--model", type=click.Choice([*BATCH_SIZES, "large"]), default="mnist", show_default=True,
    help="Model to train; large has 52 million parameters.",
)  # fmt: skip
@click.option(
    "--every", type=click.IntRange(1), default=50, show_default=True, metavar="N",
    help="Steps between two checkpoints.",
)  # fmt: skip
@click.option(
    "--folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=lambda: Path(tempfile.gettempdir()), show_default="the system's temporary folder",
    help="Folder for the checkpoints.",
)  # fmt: skip
@measured
def checkpoints(
    context: click.Context, np: int, model: str, every: int, folder: Path, controller: str, passes: int,
) -> None:  # fmt: skip
    """Step time of the Trainer with checkpoints against without.

    Each worker has one core. A checkpoint is written while the training continues; a step waits only until the state
    has been copied, which is compared with one copy in memory. A pass trains for 25 times --every steps: 20 seconds
    for a small network; 10 minutes for the large one, or 2 minutes with --every 10.
    """
    launch, chosen = launcher(controller)
    title = announce(f"{model}, {np} workers over {chosen}, a checkpoint every {every} steps")
    batch_size = BATCH_SIZES.get(model, 1)
    done: list[CheckpointCost] = []
    for one in measure_checkpoint_cost(model, batch_size, every, np, passes, folder, launch):
        done.append(one)
        without, saving = 1e3 * one.steps.reference, 1e3 * one.steps.measured
        click.echo(
            f"  a step without {without:8.2f} ms, with {saving:8.2f} ms, ratio {one.steps.ratio:.3f}; it waits "
            f"{1e3 * one.wait:.1f} ms for a checkpoint; a copy {1e3 * one.copy:.1f} ms, "
            f"into warm memory {1e3 * one.copy_again:.1f} ms"
        )
    ratio = in_passes([one.steps.ratio for one in done])
    median = statistics.median
    cost = 1e3 * every * median(one.steps.measured - one.steps.reference for one in done)
    click.echo(
        f"medians of {passes}: ratio {ratio}; {cost:.1f} ms for a checkpoint of {done[0].bytes / 1e6:.1f} MB; "
        f"a step waits {median(one.wait / one.copy for one in done):.2f} times as long as one copy in memory takes"
    )
    times = {
        "a step without checkpoints": [one.steps.reference for one in done],
        "a step with them": [one.steps.measured for one in done],
        "a step waits for a checkpoint": [one.wait for one in done],
        "a copy in memory": [one.copy for one in done],
    }
    bars = (Figure(name, tuple(1e3 * s for s in seconds)) for name, seconds in times.items())
    finish(context, title, "ms", bars)
