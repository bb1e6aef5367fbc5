"""`hvdtrain bench`: figures of the machine at hand."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from hvdtrain.bench.scaling import Pass, measure
from hvdtrain.bench.startup import StartPass, measure_startup, median
from hvdtrain.launch.command import launch_command
from hvdtrain.launch.engine import choose_controller, find_engine, find_mpirun
from hvdtrain.launch.plan import LaunchPlan

BATCH_SIZES = {"mnist": 64, "resnet20": 32}
_CONTROLLER = click.option(
    "--controller", type=click.Choice(["auto", "mpi", "gloo"]), default="auto", show_default=True
)
_PASSES = click.option(
    "--passes", type=click.IntRange(1), default=5, show_default=True, help="Pairs of timings."
)


@click.group()
def bench() -> None:
    """Measure training throughput and start-up."""


@bench.command()
@click.option(
    "-np",
    "--num-proc",
    "np",
    type=click.IntRange(2),
    default=2,
    show_default=True,
    metavar="N",
    help="Workers.",
)
@click.option("--model", type=click.Choice(sorted(BATCH_SIZES)), default="mnist", show_default=True)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Examples a worker.  [default: 64 mnist, 32 resnet20]",
)
@click.option(
    "--way",
    type=click.Choice(["keras", "trainer", "bare"]),
    default="keras",
    show_default=True,
    help="DistributedOptimizer in Keras's loop, the Trainer, or hvd.allreduce on each gradient.",
)
@_CONTROLLER
@_PASSES
def scaling(
    np: int, model: str, batch_size: int | None, way: str, controller: str, passes: int
) -> None:
    """N workers of one core each, against plain Keras on one core, in turn."""
    batch_size = batch_size or BATCH_SIZES[model]
    engine, mpirun = find_engine(), find_mpirun()
    chosen = choose_controller(controller, engine.built, mpirun)

    def launch(script: Path, arguments: tuple[str, ...]) -> list[str]:
        plan = LaunchPlan(script=script, arguments=arguments, np=np, controller=chosen)
        return launch_command(plan, path=os.environ.get("PATH", ""), mpirun=mpirun)

    click.echo(
        f"{model}, batch {batch_size} a worker, {np} workers over {chosen}, {way}; {_machine()}"
    )
    done: list[Pass] = []
    for one in measure(model, batch_size, way, passes, launch):
        done.append(one)
        click.echo(
            f"  plain Keras {one.plain:9,.0f} examples/s   {one.size} workers {one.ranks:9,.0f} examples/s   "
            f"scaling {one.scaling:.3f}"
        )
    plain = statistics.median(one.plain for one in done)
    ranks = statistics.median(one.ranks for one in done)
    median = statistics.median(one.scaling for one in done)
    click.echo(
        f"median of {passes}: plain Keras {plain:,.0f}, {np} workers {ranks:,.0f} examples/s, scaling {median:.3f}"
    )
    click.echo(
        f"again: {shlex.join(['hvdtrain', 'bench', 'scaling', '-np', str(np), '--model', model, '--way', way])}"
    )


@bench.command()
@click.option(
    "-np",
    "--num-proc",
    "np",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Workers.",
)
@_CONTROLLER
@_PASSES
def startup(np: int, controller: str, passes: int) -> None:
    """Time to the first worker's first line, against bare horovodrun, in turn."""
    chosen = choose_controller(controller, find_engine().built, find_mpirun())
    click.echo(f"{np} workers over {chosen}; {_machine()}")
    done: list[StartPass] = []
    for one in measure_startup(np, chosen, passes):
        done.append(one)
        click.echo(f"  hvdtrain run {one.ours:6.2f} s   horovodrun {one.bare:6.2f} s")
    middle = median(done)
    click.echo(
        f"median of {passes}: hvdtrain run {middle.ours:.2f} s, horovodrun {middle.bare:.2f} s"
    )


def _machine() -> str:
    packages = []
    for name in ("tensorflow", "tensorflow-cpu", "keras", "horovod"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{os.cpu_count()} CPUs ({_processor()}), {', '.join(packages)}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
