"""`hvdtrain bench`: measure performance on this machine."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import click

from hvdtrain.bench.bandwidth import RAW, SIZES, Timing, measure_collectives
from hvdtrain.bench.figures import Figure, three_digits
from hvdtrain.bench.input import KINDS, measure_input, write_files
from hvdtrain.bench.measurement import Comparison, in_passes, medians
from hvdtrain.bench.peers import REFERENCE, WAYS, measure_peers
from hvdtrain.bench.pipeline_bubble import LAYERS, Bubble, measure_bubble, theory
from hvdtrain.bench.scaling import Pass, measure
from hvdtrain.bench.slow_link import GOALS, SlowTraining, measure_slow_link
from hvdtrain.bench.slow_link import WAYS as SYNC_WAYS
from hvdtrain.bench.sockets import COLLECTIVES
from hvdtrain.cli.bench_costs import checkpoints, memory, overhead, startup
from hvdtrain.cli.bench_options import (
    BATCH_SIZES,
    CONTROLLER,
    MODEL,
    OUTPUT,
    announce,
    batch_size_per,
    finish,
    launcher,
    line,
    measured,
    pair,
    workers,
)
from hvdtrain.errors import EngineError
from hvdtrain.launch.hosts import parse_hosts
from hvdtrain.launch.launchers.horovodrun import STAND_IN
from hvdtrain.launch.running.timed_command import ending_commands


@click.group()
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure throughput, collectives, input, start-up, memory, pipelines and checkpoints."""
    context.with_resource(ending_commands())


for _command in (checkpoints, memory, overhead, startup):
    bench.add_command(_command)


@bench.command()
@workers(2)
@MODEL
@batch_size_per("worker")
@click.option(
    "--way", type=click.Choice(["keras", "trainer", "bare"]), default="keras", show_default=True,
    help="DistributedOptimizer in Keras's loop, the Trainer, or hvd.allreduce on each gradient.",
)  # fmt: skip
@measured
def scaling(
    context: click.Context, np: int, model: str, batch_size: int | None, way: str, controller: str, passes: int,
) -> None:  # fmt: skip
    """Throughput of N workers against plain Keras, each on one core.

    For comparison it also measures what the machine allows: N independent Keras processes at once, what these would
    reach if each step waited for the slowest of them, and Keras processes that exchange as many bytes as the gradients
    have after each step, by MPI itself or, for Gloo, through TCP sockets. They train in turns, and all are in memory at
    once: three processes for each worker.
    """
    batch_size = batch_size or BATCH_SIZES[model]
    launch, chosen = launcher(controller)
    title = announce(f"{model}, batch {batch_size} per worker, {np} workers over {chosen}, {way}")
    raw = RAW[chosen]
    names = {
        "plain": "plain Keras, one core", "apart": f"{np} independent processes",
        "in_step": f"{np} processes in step", "raw": f"{np} processes and raw {raw.upper()}",
        "ranks": f"{np} workers",
    }  # fmt: skip
    done: list[Pass] = []
    for one in measure(model, batch_size, way, passes, np, raw, launch):
        done.append(one)
        rates = (f"{name} {three_digits(getattr(one, key))}" for key, name in names.items())
        click.echo(f"  {', '.join(rates)}; scaling {one.scaling(one.ranks):.3f}")
    click.echo(f"medians of {passes} passes; last, the workers' rate divided by it:")
    for key, name in names.items():
        rate = statistics.median(getattr(one, key) for one in done)
        ratio = in_passes([one.ranks / getattr(one, key) for one in done])
        click.echo(f"  {name:35} {three_digits(rate):>8} examples/s {ratio}")
    click.echo(f"scaling: {in_passes([one.scaling(one.ranks) for one in done])} of perfect")
    figures = (
        Figure(name, tuple(getattr(one, key) for one in done)) for key, name in names.items()
    )
    finish(context, title, "examples/s", figures)


@bench.command()
@workers(2)
@MODEL
@batch_size_per("core")
@measured
def peers(
    context: click.Context, np: int, model: str, batch_size: int | None, controller: str, passes: int,
) -> None:  # fmt: skip
    """Throughput of hvdtrain against other ways to train on the same N cores.

    Keras without workers, MirroredStrategy and, if installed, Horovod's own optimizer on tf-keras and PyTorch. All
    train the same network on the same global batch, each in turns with one Keras process on all cores.
    """
    batch_size = batch_size or BATCH_SIZES[model]
    launch, chosen = launcher(controller)
    title = announce(f"{model}, batch {batch_size} per core, {np} cores, {chosen}")

    def plain(np: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
        # With horovodrun itself, ranks that start Horovod again may find old addresses (start/parts/rendezvous.py).
        return [*STAND_IN, "-np", str(np), f"--{chosen}", sys.executable, str(script), *arguments]

    done: dict[str, list[Comparison]] = {}
    for name, turns in measure_peers(model, batch_size, passes, np, launch, plain):
        if isinstance(turns, EngineError):
            click.echo(f"  left out: {WAYS[name].title}. {turns}")
            continue
        done[name] = turns
        reference, rate, _ = medians(turns)
        click.echo(
            f"  {WAYS[name].title}: {three_digits(rate)} examples/s; in turns with {three_digits(reference)}"
        )
    ratios = {name: [one.ratio for one in turns] for name, turns in done.items()}
    ratios[REFERENCE] = [1.0]
    names = sorted(ratios, key=lambda name: statistics.median(ratios[name]), reverse=True)
    alone = statistics.median(one.reference for turns in done.values() for one in turns)
    click.echo(
        f"medians of {passes}, as a fraction of one process on all cores ({three_digits(alone)} examples/s):"
    )
    for name in names:
        click.echo(f"  {WAYS[name].title:45} {in_passes(ratios[name])}")
    if not WAYS[names[0]].ours:
        click.echo(f"fastest here: {WAYS[names[0]].title}")
    bars = (Figure(WAYS[name].title, tuple(ratios[name])) for name in names)
    finish(context, title, "examples/s, as a fraction of one process on all cores", bars)


@bench.command()
@workers(2)
@click.option(
    "--collective", "names", type=click.Choice(COLLECTIVES), multiple=True,
    help="Collective to measure. May be repeated.  [default: all]",
)  # fmt: skip
@click.option(
    "--bytes", "sizes", type=click.IntRange(4), multiple=True, metavar="N",
    help="Size of the result, or of each rank's input if that is larger. May be repeated.  [default: 4 to 64 "
         "Mi by factors of 16, and 256 Mi]",
)  # fmt: skip
@measured
def collectives(
    context: click.Context, np: int, names: tuple[str, ...], sizes: tuple[int, ...], controller: str, passes: int,
) -> None:  # fmt: skip
    """Latency and bandwidth of Horovod's collectives against MPI itself or, for Gloo, against TCP sockets.

    Bandwidths as nccl-tests defines them, in GB/s: algorithm, bytes per second of a call; bus, what each link carries.
    """
    launch, chosen = launcher(controller)
    title = announce(f"{np} ranks over {chosen}, float32, medians of {passes}")
    raw = RAW[chosen]
    click.echo(line(("", "bytes", "ms", "algorithm", "bus", f"{raw.upper()} ms", "bus")))
    done = []
    for one in measure_collectives(names or COLLECTIVES, sizes or SIZES, np, passes, raw, launch):
        done.append(one)
        click.echo(line(_timing(one)))
    click.echo(f"a copy in memory: {statistics.median(one.copy for one in done) / 1e9:.2f} GB/s")
    curves = (
        Figure(series, (one.bus_bandwidth(seconds) / 1e9,), one.name, one.bytes)
        for one in done
        for series, seconds in (("Horovod", one.horovod), (raw.upper(), one.raw))
    )
    finish(context, title, "bus bandwidth in GB/s", curves, "bytes")


def _timing(one: Timing) -> tuple[str, ...]:
    """Return the cells of a row, with bandwidths in GB/s."""
    cells = [one.name, str(one.bytes), f"{1e3 * one.horovod:.3f}"]
    cells += [
        f"{one.bandwidth(one.horovod) / 1e9:.2f}",
        f"{one.bus_bandwidth(one.horovod) / 1e9:.2f}",
    ]
    return (*cells, f"{1e3 * one.raw:.3f}", f"{one.bus_bandwidth(one.raw) / 1e9:.2f}")


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
@measured
def pipeline(
    context: click.Context, stages: int, counts: tuple[int, ...], width: int, batch_size: int, controller: str,
    passes: int,
) -> None:  # fmt: skip
    """Step time of pipeline stages.

    With s stages of one core each and m micro-batches, the schedule alone makes a step (m + s - 1) / m times as long as
    if no stage waited. That is 1 / s of the time of one stage with all layers ("ideal"), or the time of the stages when
    each trains its layers by itself ("stages alone").
    """
    launch, chosen = launcher(controller)
    title = announce(
        f"{LAYERS * stages} dense layers of {width}, batch {batch_size}, {stages} stages over {chosen}"
    )
    click.echo("m: (m + s - 1) / m; step time / ideal; step time / that of stages alone; ms")
    done: dict[int, list[Bubble]] = {}
    for count, passed in measure_bubble(counts, stages, width, batch_size, passes, launch):
        done[count] = passed
        ratios, of_stages = (
            [getattr(one, name) for one in passed] for name in ("ratio", "of_stages")
        )
        milliseconds = 1e3 * medians(passed)[1]
        cells = (f"{theory(count, stages):.3f}", in_passes(ratios), in_passes(of_stages))
        click.echo(f"  {count:3d}: {'; '.join(cells)}; {milliseconds:.1f}")
    curves = [
        Figure(name, tuple(getattr(one, figure) for one in passed), x=count)
        for name, figure in (("of the ideal", "ratio"), ("of that of stages alone", "of_stages"))
        for count, passed in done.items()
    ]
    curves += [Figure("schedule alone", (theory(m, stages),), x=m) for m in counts]
    finish(context, title, "step time, as a ratio", curves, "micro-batches")


@bench.command(name="input")
@workers(2)
@click.option(
    "--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Kind of file.  [default: all]",
)  # fmt: skip
@click.option(
    "--files", type=click.IntRange(1), default=2000, show_default=True, help="Number of examples."
)
@measured
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
    launch, chosen = launcher(controller)
    title = announce(f"{files} images, {np} workers over {chosen}")
    bars: list[Figure] = []
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
            ratio = in_passes([one.ratio for one in done])
            click.echo(f"  {kind}: median of {passes}: ratio {ratio}")
            bars += pair("one worker", f"{np} workers", done, kind)
    finish(context, title, "examples/s", bars)


@bench.command()
@click.option("-H", "--hosts", required=True, metavar="NAME:SLOTS,...", help="At least two hosts.")
@click.option(
    "--task", type=click.Choice(list(GOALS)), default="digits", show_default=True,
    help="Handwritten digits, or the next character of a text.",
)  # fmt: skip
@click.option(
    "--way", "ways", type=click.Choice(SYNC_WAYS), multiple=True, help="May be repeated.  [default: all]"
)  # fmt: skip
@click.option(
    "--every", type=click.IntRange(1), default=22, show_default=True, metavar="N",
    help="Steps in a round; an epoch has 22 (digits) or 352 (text).",
)  # fmt: skip
@click.option(
    "--goal", type=click.FloatRange(0, 1), help="Accuracy to reach.  [default: 0.97 for digits, 0.5 for text]"
)  # fmt: skip
@CONTROLLER
@OUTPUT
@click.pass_context
def slow_link(
    context: click.Context, hosts: str, task: str, ways: tuple[str, ...], every: int, goal: float | None,
    controller: str,
) -> None:  # fmt: skip
    """Bytes and time to the same quality with Trainer(sync=...) and lossy compression, between hosts.

    Trains scikit-learn's digits or a model of characters until the accuracy is reached, with a cycle time of 20 ms. It
    does not slow the link down: use a slow one, or limit a fast one with tc.
    """
    goal = GOALS[task] if goal is None else goal
    known = parse_hosts(hosts)
    if len(known) < 2:
        raise click.UsageError("-H: pass at least two hosts, such as -H node1:1,node2:1")
    # The ranks of Horovod talk to each other in every cycle, also where there is nothing to send.
    launch, chosen = launcher(controller, hosts=known, cycle_time_ms=20.0)
    ranks = sum(host.slots for host in known)
    title = announce(f"{ranks} workers on {len(known)} hosts over {chosen}, {task}, every={every}")
    click.echo(line(("", "accuracy", "steps", "bytes/step", "seconds", "fewer bytes", "faster")))
    first: SlowTraining | None = None
    bars = []
    for one in measure_slow_link(task, ways or SYNC_WAYS, every, goal, launch, ranks):
        first = first or one
        cells = [one.way, f"{one.accuracy:.3f}", str(one.steps), f"{one.bytes / one.steps:,.0f}"]
        less, faster = first.bytes / one.bytes, first.seconds / one.seconds
        click.echo(line((*cells, f"{one.seconds:.1f}", f"{less:.1f} x", f"{faster:.1f} x")))
        bars += [Figure(one.way, (one.bytes / one.steps,), "bytes per step")]
        bars += [Figure(one.way, (one.seconds,), f"seconds to accuracy {goal:g}")]
    finish(context, title, "", bars)
