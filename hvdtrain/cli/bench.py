"""`hvdtrain bench`: measure performance on this machine."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from hvdtrain.bench.bandwidth import FACTORS, SIZES, Timing, measure_collectives
from hvdtrain.bench.checkpoint_cost import CheckpointCost, measure_checkpoint_cost
from hvdtrain.bench.input import KINDS, measure_input, write_files
from hvdtrain.bench.measurement import Comparison, Launch, medians
from hvdtrain.bench.measurement import horovodrun as plain_horovodrun
from hvdtrain.bench.memory import CASES, HEADER, measure_peaks, parameters_of, row
from hvdtrain.bench.overhead import DATA, measure_overhead
from hvdtrain.bench.peers import WAYS, measure_peers
from hvdtrain.bench.pipeline_bubble import measure_bubble, theory
from hvdtrain.bench.scaling import Pass, measure
from hvdtrain.bench.slow_link import WAYS as SYNC_WAYS
from hvdtrain.bench.slow_link import SlowTraining, measure_slow_link
from hvdtrain.bench.startup import measure_startup
from hvdtrain.install.build_environment import version_of
from hvdtrain.launch.hosts import parse_hosts
from hvdtrain.launch.installed_horovod import choose_controller, find_mpirun, installed_controllers
from hvdtrain.launch.launch_command import this_site
from hvdtrain.launch.launchers import horovodrun
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rank_program import Program
from hvdtrain.launch.running.timed_command import ending_commands

_Command = TypeVar("_Command", bound=Callable[..., Any])
BATCH_SIZES = {"mnist": 64, "resnet20": 32, "mlp": 64}
_BATCH_SIZES = ", ".join(f"{size} {model}" for model, size in BATCH_SIZES.items())


def _workers(least: int) -> Callable[[_Command], _Command]:
    """Return the option -np of a measurement that needs at least this many workers."""
    return click.option(
        "-np", "--num-proc", "np", type=click.IntRange(least), default=2, show_default=True, metavar="N",
        help="Number of workers.",
    )  # fmt: skip


_CONTROLLER = click.option(
    "--controller", type=click.Choice(["auto", "mpi", "gloo"]), default="auto", show_default=True
)
_MODEL = click.option(
    "--model", type=click.Choice(sorted(BATCH_SIZES)), default="mnist", show_default=True
)
_PASSES = click.option(
    "--passes", type=click.IntRange(1), default=5, show_default=True, help="Number of measurements.",
)  # fmt: skip


@click.group()
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure throughput, collectives, input, start-up, memory, pipelines and checkpoints."""
    context.with_resource(ending_commands())


@bench.command()
@_workers(2)
@_MODEL
@click.option(
    "--batch-size", type=click.IntRange(1), help=f"Examples per worker.  [default: {_BATCH_SIZES}]"
)
@click.option(
    "--way", type=click.Choice(["keras", "trainer", "bare"]), default="keras", show_default=True,
    help="DistributedOptimizer in Keras's loop, the Trainer, or hvd.allreduce on each gradient.",
)  # fmt: skip
@_CONTROLLER
@_PASSES
@click.pass_context
def scaling(
    context: click.Context, np: int, model: str, batch_size: int | None, way: str, controller: str, passes: int,
) -> None:  # fmt: skip
    """Throughput of N workers against plain Keras, each on one core.

    For comparison it also measures what the machine allows: N independent Keras processes at once, and what these
    would reach if each step waited for the slowest of them.
    """
    batch_size = batch_size or BATCH_SIZES[model]
    launch, chosen = _launcher(controller)
    click.echo(
        f"{model}, batch {batch_size} per worker, {np} workers over {chosen}, {way}; {_machine()}"
    )
    done: list[Pass] = []
    for one in measure(model, batch_size, way, passes, np, launch):
        done.append(one)
        click.echo(
            f"  plain Keras {one.plain:8,.0f} examples/s; {np} independent processes {one.apart:8,.0f}, in "
            f"step {one.in_step:8,.0f}, workers {one.ranks:8,.0f}; scaling {one.scaling(one.ranks):.3f}"
        )
    median = statistics.median
    reached = median(one.scaling(one.ranks) for one in done)
    apart = median(one.scaling(one.apart) for one in done)
    in_step = median(one.scaling(one.in_step) for one in done)
    below = median(one.ranks / one.in_step for one in done)
    click.echo(
        f"medians of {passes}: scaling {reached:.3f}; independent processes {apart:.3f}, in step "
        f"{in_step:.3f}; workers / in step {below:.3f}"
    )
    click.echo(_again(context))


@bench.command()
@_workers(2)
@_MODEL
@click.option(
    "--batch-size", type=click.IntRange(1), help=f"Examples per core.  [default: {_BATCH_SIZES}]"
)
@_CONTROLLER
@_PASSES
@click.pass_context
def peers(
    context: click.Context, np: int, model: str, batch_size: int | None, controller: str, passes: int,
) -> None:  # fmt: skip
    """Throughput of hvdtrain against other ways to train on the same N cores.

    One Keras process, MirroredStrategy, and Horovod's own optimizer on tf-keras if that is installed. All train the
    same network on the same global batch. A pass takes about two minutes.
    """
    batch_size = batch_size or BATCH_SIZES[model]
    launch, chosen = _launcher(controller)
    click.echo(f"{model}, batch {batch_size} per core, {np} cores, {chosen}; {_machine()}")

    def plain(np: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
        return [*plain_horovodrun(np, chosen), sys.executable, str(script), *arguments]

    done = []
    for one in measure_peers(model, batch_size, passes, np, launch, plain):
        done.append(one)
        click.echo("  " + ", ".join(f"{name} {rate:,.0f}" for name, rate in one.items()))
    rates = {name: statistics.median(one[name] for one in done) for name in done[0]}
    click.echo(f"medians of {passes}, examples/s:")
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
        click.echo(f"  {WAYS[name].title:45} {rate:10,.0f}  {rate / rates['threads']:.2f}")
    if rates["threads"] >= max(rate for name, rate in rates.items() if WAYS[name].ours):
        click.echo("one process on all cores is as fast here: train this network without workers")
    click.echo(_again(context))


@bench.command()
@_workers(2)
@click.option(
    "--collective", "names", type=click.Choice(list(FACTORS)), multiple=True,
    help="Collective to measure. May be repeated.  [default: all]",
)  # fmt: skip
@click.option(
    "--bytes", "sizes", type=click.IntRange(4), multiple=True, metavar="N",
    help="Size of the result, or of each rank's input if that is larger. May be repeated.  [default: 4 to 64 "
         "Mi by factors of 16, and 256 Mi]",
)  # fmt: skip
@_CONTROLLER
@_PASSES
@click.pass_context
def collectives(
    context: click.Context, np: int, names: tuple[str, ...], sizes: tuple[int, ...], controller: str, passes: int,
) -> None:  # fmt: skip
    """Latency and bandwidth of Horovod's collectives, over MPI against MPI itself.

    Bandwidths as nccl-tests defines them, in GB/s: algorithm, bytes per second of a call; bus, what each link carries.
    """
    launch, chosen = _launcher(controller)
    click.echo(f"{np} ranks over {chosen}, float32, medians of {passes}; {_machine()}")
    heads = ("bytes", "ms", "algorithm", "bus", *(("MPI ms", "bus") if chosen == "mpi" else ()))
    click.echo(_line(("", *heads)))
    done = []
    for one in measure_collectives(
        names or list(FACTORS), sizes or SIZES, np, passes, chosen == "mpi", launch
    ):
        done.append(one)
        click.echo(_line(_timing(one)))
    click.echo(f"a copy in memory: {statistics.median(one.copy for one in done) / 1e9:.2f} GB/s")
    click.echo(_again(context))


def _timing(one: Timing) -> tuple[str, ...]:
    """Return the cells of a row, with bandwidths in GB/s."""
    cells = [one.name, str(one.bytes), f"{1e3 * one.horovod:.3f}"]
    cells += [
        f"{one.bandwidth(one.horovod) / 1e9:.2f}",
        f"{one.bus_bandwidth(one.horovod) / 1e9:.2f}",
    ]
    if one.raw is not None:
        cells += [f"{1e3 * one.raw:.3f}", f"{one.bus_bandwidth(one.raw) / 1e9:.2f}"]
    return tuple(cells)


@bench.command()
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
@_CONTROLLER
@click.pass_context
def memory(
    context: click.Context, names: tuple[str, ...], width: int, blocks: int, controller: str
) -> None:
    """Peak memory of a rank with Adam."""
    launch, chosen = _launcher(controller)
    parameters = parameters_of(width, blocks)
    click.echo(
        f"{parameters / 1e6:.1f} million parameters, float32, Adam, over {chosen}; MB per rank; "
        f"{_machine()}"
    )
    click.echo(_line(HEADER))
    for name in names or CASES:
        peaks = measure_peaks(CASES[name], launch, width, blocks)
        click.echo(_line(row(CASES[name], parameters, peaks)))
    click.echo(_again(context))


def _line(cells: tuple[str, ...]) -> str:
    return "".join(f" {cell:>13}" for cell in cells)


@bench.command()
@_workers(1)
@_CONTROLLER
@_PASSES
@click.pass_context
def startup(context: click.Context, np: int, controller: str, passes: int) -> None:
    """Start-up time against plain horovodrun."""
    chosen = choose_controller(controller, installed_controllers(), find_mpirun())
    click.echo(f"{np} workers over {chosen}; {_machine()}")
    done: list[Comparison] = []
    for one in measure_startup(np, chosen, passes):
        done.append(one)
        click.echo(f"  hvdtrain run {one.measured:6.2f} s   horovodrun {one.reference:6.2f} s")
    bare, ours, _ = medians(done)
    click.echo(f"median of {passes}: hvdtrain run {ours:.2f} s, horovodrun {bare:.2f} s")
    click.echo(_again(context))


@bench.command()
@click.option(
    "--stages", type=click.IntRange(2), default=2, show_default=True, metavar="N",
    help="Stages, one worker each.",
)  # fmt: skip
@click.option(
    "--micro-batches", "counts", type=click.IntRange(1), multiple=True, default=(1, 2, 4, 8, 16),
    show_default=True, metavar="N", help="Micro-batches per step. May be repeated.",
)  # fmt: skip
@click.option(
    "--width", type=click.IntRange(1), default=512, show_default=True, help="Width of the dense layers.",
)  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1), default=1024, show_default=True)
@_CONTROLLER
@_PASSES
@click.pass_context
def pipeline(
    context: click.Context, stages: int, counts: tuple[int, ...], width: int, batch_size: int, controller: str,
    passes: int,
) -> None:  # fmt: skip
    """Step time of pipeline stages.

    With s stages of one core each and m micro-batches, the schedule alone takes (m + s - 1) / m of the ideal time.
    """
    launch, chosen = _launcher(controller)
    click.echo(
        f"{4 * stages} dense layers of {width}, batch {batch_size}, {stages} stages over {chosen}; {_machine()}"
    )
    done: list[dict[int, Comparison]] = []
    for one in measure_bubble(counts, stages, width, batch_size, passes, launch):
        done.append(one)
        ratios = "   ".join(f"m={count} {found.ratio:.3f}" for count, found in one.items())
        click.echo(f"  step time / ideal: {ratios}")
    click.echo(f"medians of {passes}: m, ideal ms, measured ms, measured / ideal, (m + s - 1) / m")
    for count in counts:
        ideal, seconds, ratio = medians([one[count] for one in done])
        click.echo(
            f"  {count:3d} {1e3 * ideal:9.1f} {1e3 * seconds:9.1f} {ratio:9.3f} {theory(count, stages):9.3f}"
        )
    click.echo(_again(context))


@bench.command(name="input")
@_workers(2)
@click.option(
    "--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Kind of file.  [default: all]",
)  # fmt: skip
@click.option(
    "--files", type=click.IntRange(1), default=2000, show_default=True, help="Number of examples."
)
@_CONTROLLER
@_PASSES
@click.pass_context
def read(
    context: click.Context,
    np: int,
    kinds: tuple[str, ...],
    files: int,
    controller: str,
    passes: int,
) -> None:
    """Rate of reading and decoding images.

    Compares N workers of one thread each with one worker. Nothing is trained.
    """
    launch, chosen = _launcher(controller)
    click.echo(f"{files} images, {np} workers over {chosen}; {_machine()}")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        for kind in kinds or KINDS:
            write_files(Path(folder), kind, files)
            done: list[Comparison] = []
            for one in measure_input(kind, Path(folder), np, passes, launch):
                done.append(one)
                click.echo(
                    f"  {kind}: one {one.reference:7,.0f} examples/s, {np} workers {one.measured:7,.0f}; "
                    f"ratio {one.ratio:.3f}"
                )
            _, _, ratio = medians(done)
            click.echo(f"  {kind}: median of {passes}: ratio {ratio:.3f}")
    click.echo(_again(context))


@bench.command()
@_workers(1)
@click.option(
    "--model", "models", type=click.Choice(list(BATCH_SIZES)), multiple=True,
    help="Model to train. May be repeated.  [default: all]",
)  # fmt: skip
@click.option("--data", "kinds", type=click.Choice(DATA), multiple=True, help="[default: both]")
@_CONTROLLER
@_PASSES
@click.pass_context
def overhead(
    context: click.Context, np: int, models: tuple[str, ...], kinds: tuple[str, ...], controller: str, passes: int,
) -> None:  # fmt: skip
    """Step time of the Trainer against Keras's fit.

    Each worker has one core. With several workers fit uses hvdtrain.keras.DistributedOptimizer.
    """
    launch, chosen = _launcher(controller)
    click.echo(f"{np} workers over {chosen}; medians of {passes}; {_machine()}")
    for model in models or BATCH_SIZES:
        for kind in kinds or DATA:
            done = measure_overhead(model, kind, BATCH_SIZES[model], np, passes, launch)
            fit, trainer, ratio = medians(done)
            click.echo(
                f"  {model:>8}, {kind:>7}: fit {fit:7.2f} ms, Trainer {trainer:7.2f} ms; ratio {ratio:.3f}"
            )
    click.echo(_again(context))


@bench.command()
@_workers(1)
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
@_CONTROLLER
@_PASSES
@click.pass_context
def checkpoints(
    context: click.Context, np: int, model: str, every: int, folder: Path, controller: str, passes: int,
) -> None:  # fmt: skip
    """Step time of the Trainer with checkpoints against without.

    Each worker has one core. A checkpoint is written while the training continues; a step waits only until the state
    has been copied, which is compared with one copy in memory. A pass trains for 24 times --every steps: 20 seconds
    of a small network; 10 minutes of the large one, or 2 minutes with --every 10.
    """
    launch, chosen = _launcher(controller)
    click.echo(
        f"{model}, {np} workers over {chosen}, a checkpoint every {every} steps; {_machine()}"
    )
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
    _, _, ratio = medians([one.steps for one in done])
    median = statistics.median
    cost = 1e3 * every * median(one.steps.measured - one.steps.reference for one in done)
    click.echo(
        f"medians of {passes}: ratio {ratio:.3f}; {cost:.1f} ms for a checkpoint of {done[0].bytes / 1e6:.1f} MB; "
        f"a step waits {median(one.wait / one.copy for one in done):.2f} times as long as one copy in memory takes"
    )
    click.echo(_again(context))


@bench.command()
@click.option("-H", "--hosts", required=True, metavar="NAME:SLOTS,...", help="At least two hosts.")
@click.option(
    "--way", "ways", type=click.Choice(SYNC_WAYS), multiple=True, help="May be repeated.  [default: all]"
)  # fmt: skip
@click.option(
    "--every", type=click.IntRange(1), default=22, show_default=True, metavar="N",
    help="Steps in a round; an epoch has 22.",
)  # fmt: skip
@click.option(
    "--goal", type=click.FloatRange(0, 1), default=0.97, show_default=True, help="Accuracy to reach."
)  # fmt: skip
@_CONTROLLER
@click.pass_context
def slow_link(
    context: click.Context, hosts: str, ways: tuple[str, ...], every: int, goal: float, controller: str
) -> None:  # fmt: skip
    """Bytes and time to the same quality with Trainer(sync=...) and lossy compression, between hosts.

    Trains on scikit-learn's digits until the accuracy is reached, with a cycle time of 20 ms. It does not slow the link
    down: use a slow one, or limit a fast one with tc.
    """
    known = parse_hosts(hosts)
    if len(known) < 2:
        raise click.UsageError("-H: pass at least two hosts, such as -H node1:1,node2:1")
    # The ranks of Horovod talk to each other in every cycle, also where there is nothing to send.
    launch, chosen = _launcher(controller, hosts=known, cycle_time_ms=20.0)
    ranks = sum(host.slots for host in known)
    click.echo(f"{ranks} workers on {len(known)} hosts over {chosen}, every={every}; {_machine()}")
    click.echo(_line(("", "accuracy", "steps", "bytes/step", "seconds", "fewer bytes", "shorter")))
    first: SlowTraining | None = None
    for one in measure_slow_link(ways or SYNC_WAYS, every, goal, launch, ranks):
        first = first or one
        cells = [one.way, f"{one.accuracy:.3f}", str(one.steps), f"{one.bytes / one.steps:,.0f}"]
        less, shorter = first.bytes / one.bytes, first.seconds / one.seconds
        click.echo(_line((*cells, f"{one.seconds:.1f}", f"{less:.1f} x", f"{shorter:.1f} x")))
    click.echo(_again(context))


def _again(context: click.Context) -> str:
    """Return the line that shows how to repeat the measurement."""
    words = context.command_path.split()
    for parameter in context.command.params:
        value = context.params[parameter.name]
        values = value if parameter.multiple else [value]
        option = max(parameter.opts, key=len)
        words += [word for one in values if one is not None for word in (option, str(one))]
    return f"again: {shlex.join(words)}"


def _launcher(controller: str, **settings: Any) -> tuple[Launch, str]:
    """Return a function that composes the argv of a script on N ranks, and the controller that it uses.

    Args:
        settings: Further fields of LaunchPlan.
    """
    built, site = installed_controllers(), this_site()
    chosen = choose_controller(controller, built, site.mpirun)

    def launch(np: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
        if np == 1:
            return [sys.executable, str(script), *arguments]
        program = Program(script, arguments)
        plan = LaunchPlan(program=program, np=np, controller=chosen, **settings)
        prepared = horovodrun.prepare(plan, site)
        return prepared.with_settings(prepared.argv)

    return launch, chosen


def _machine() -> str:
    found = (
        (name, version_of(name)) for name in ("tensorflow", "tensorflow-cpu", "keras", "horovod")
    )
    packages = ", ".join(f"{name} {version}" for name, version in found if version)
    return f"{os.cpu_count()} CPUs ({_processor()}), {packages}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
