"""`hvdtrain estimate`: estimate the memory and traffic of a training run in advance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from hvdtrain.errors import EngineError
from hvdtrain.host_limits import TOO_LOW, memory_limit
from hvdtrain.rank_variables import without_rank_variables


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-np", "--num-proc", "np", type=click.IntRange(1), required=True, metavar="N", help="Number of workers."
)  # fmt: skip
@click.option(
    "--ranks-per-host", type=click.IntRange(1), metavar="N",
    help="Number of workers that share the memory of a host.  [default: all]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with sizes in bytes.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def estimate(
    np: int, ranks_per_host: int | None, as_json: bool, script: Path, arguments: tuple[str, ...]
) -> None:
    """Estimate the memory of each worker, and the bytes it sends per step, when SCRIPT runs on N workers.

    One process runs SCRIPT as worker 0 would, up to its first Trainer.fit. It builds the model and the optimizer and
    traces the training step, but trains nothing. Everything that SCRIPT does before Trainer.fit is executed, such as
    reading its data.
    """
    per_host = min(np, ranks_per_host or np)
    found = _run(np, per_host, script, arguments)
    found["host"] = {"memory": memory_limit(), "ranks": per_host}
    if as_json:
        click.echo(json.dumps(found))
        return
    for line in _lines(found, np, per_host):
        click.echo(line)


def _run(np: int, per_host: int, script: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the report of the planned fit; if it wrote none, exit with its exit code, as it has printed why.

    Raises:
        EngineError: If a signal ended the planned fit.
    """
    environ = without_rank_variables(os.environ)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-estimate-") as folder:
        report = Path(folder, "report.json")
        module = "hvdtrain.estimate.planned_fit"
        words = [str(np), str(per_host), str(report), str(script), *arguments]
        # Keep the script's output out of the report on standard output.
        done = subprocess.run(
            [sys.executable, "-P", "-m", module, *words],
            # On the CPU, so that the process has the memory that it measures, and takes none from trainings.
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **environ, "CUDA_VISIBLE_DEVICES": "-1"},
            stdout=sys.stderr.fileno(),
        )
        if not done.returncode and report.exists():
            return dict(json.loads(report.read_text()))
    if done.returncode < 0:
        raise EngineError(f"{script} was ended by signal {-done.returncode}: out of memory?")
    raise SystemExit(done.returncode or 1)


def _lines(found: Mapping[str, Any], np: int, per_host: int) -> Iterator[str]:
    memory = found["memory"]
    total = sum(memory.values())
    yield f"Each of {np} workers, {found['examples']:,} examples per step (MB = 10^6 bytes):"
    for name, size in memory.items():
        yield f"  {name:<16}{size / 1e6:>12,.1f} MB"
    yield f"  {'sum':<16}{total / 1e6:>12,.1f} MB"
    resident = found["resident"]
    yield f"  {'program, data':<16}{resident / 1e6:>12,.1f} MB of main memory, measured in this process"
    whole = (total + resident) * per_host
    host = found["host"]["memory"]
    verdict = (
        "fits" if whole * TOO_LOW < host else "may not fit" if whole < host else "does not fit"
    )
    yield (
        f"Without GPUs, {per_host} on this host: {whole / 1e9:,.2f} of {host / 1e9:,.2f} GB of memory: {verdict}"
    )
    for kind, size in found["sent"].items():
        yield f"Each worker sends {size / 1e6:,.2f} MB per step by {kind}"
    if found["unknown_messages"]:
        yield f"and {found['unknown_messages']} messages per step whose size depends on the data"
    if np > 1 and not found["messages"]:
        yield "The workers send nothing in a step"
