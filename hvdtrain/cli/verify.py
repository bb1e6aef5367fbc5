"""`hvdtrain verify`: compare a training on several workers with the same training on one."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.bench_options import CONTROLLER, launcher, workers
from hvdtrain.errors import EngineError
from hvdtrain.launch.rank_program import Program, rank_command
from hvdtrain.launch.running.timed_command import ending_commands, run
from hvdtrain.verify.recorded_run import ADOPTED, AS_IS, BACKWARDS, FORWARDS

_ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # TensorFloat-32 rounds products of a batch of another size in another way, by up to 1e-2.
    "NVIDIA_TF32_OVERRIDE": "0",
}
_RUNS = ("one", "reordered", "several")
_LINES = 20
"""Lines of a failed run's output in the message."""
_SHOWN = 3
"""Variables named of a step that differs."""


@click.command(context_settings={"allow_interspersed_args": False})
@workers(2)
@click.option(
    "--steps", type=click.IntRange(1), default=5, show_default=True, metavar="K", help="Number of steps to compare.",
)  # fmt: skip
@CONTROLLER
@click.option(
    "--timeout", type=click.IntRange(1), default=600, show_default=True, metavar="SECONDS",
    help="Time limit of each of the three runs.",
)  # fmt: skip
@click.option(
    "--adopt", is_flag=True, help="SCRIPT is an ordinary Keras script, as for hvdtrain run --adopt."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def verify(
    context: click.Context, np: int, steps: int, controller: str, timeout: int, adopt: bool, as_json: bool,
    script: Path, arguments: tuple[str, ...],
) -> None:  # fmt: skip
    """Check that SCRIPT trains on N workers as it does on one.

    Runs SCRIPT three times, up to step K: on one worker, on one worker with the examples of each Trainer batch in
    reverse order, and on N workers. Compares examples, losses, metrics, weights and optimizer state after each step.
    The second run shows how much of a difference is due to the order of summation.

    A Trainer neither resumes nor writes anything during these runs, but files that SCRIPT itself writes are written.
    The exit code is 0 if the runs match, else 1.
    """
    context.with_resource(ending_commands())
    with tempfile.TemporaryDirectory(prefix="hvdtrain-verify-") as folder:
        for name in _RUNS:
            click.echo(f"{_title(name, np)}: {steps} steps of {script}", err=True)
            Path(folder, name).mkdir()
            order = BACKWARDS if name == "reordered" else FORWARDS
            kind = ADOPTED if adopt else AS_IS
            words = (str(Path(folder, name)), str(steps), order, kind, str(script), *arguments)
            _run(_command(np if name == "several" else 1, controller, words), name, np, timeout)
        found = _findings(Path(folder))
    if as_json:
        click.echo(json.dumps(_as_json(found), allow_nan=False))
    else:
        for line in _lines(found, np):
            click.echo(line)
    context.exit(0 if found["outcome"] == "same" else 1)


def _command(np: int, controller: str, words: tuple[str, ...]) -> list[str]:
    module = Path("hvdtrain.verify.recorded_run")
    if np == 1:  # With the environment of a rank as well.
        return rank_command(Program(module, words, kind="module"))
    launch, _ = launcher(controller, kind="module")
    return launch(np, module, words)


def _run(command: list[str], name: str, np: int, timeout: int) -> None:
    """Run one of the three.

    Raises:
        EngineError: It failed, or took longer than `timeout` seconds.
    """
    done = run(command, limit=timeout, environ={**_ENVIRONMENT, **os.environ})
    assert done is not None, "this Python has gone"
    if done.returncode == 0:
        return
    how = (
        f"took longer than {timeout} s"
        if done.returncode is None
        else f"failed (exit code {done.returncode})"
    )
    raise EngineError(f"The run on {_title(name, np)} {how}:\n{done.last_lines(_LINES)}")


def _title(name: str, np: int) -> str:
    return {
        "one": "1 worker",
        "reordered": "1 worker, batches in reverse order",
        "several": f"{np} workers",
    }[name]


def _findings(folder: Path) -> dict[str, Any]:
    """Return the verdict and what it rests on, as JSON types."""
    from hvdtrain.verify.comparison import compare
    from hvdtrain.verify.likely_causes import likely_causes
    from hvdtrain.verify.recording import read_recording

    one, reordered, several = (read_recording(folder / name) for name in _RUNS)
    steps = compare(one, reordered, several)
    bad = next((step for step in steps if step.outcome != "same"), None)
    short = len({len(run.steps) for run in (one, reordered, several)}) > 1
    outcome = bad.outcome if bad else "different" if short else "same"
    causes = [] if bad is None else likely_causes(one, reordered, several, bad)
    if short and bad is None:
        counts = [len(run.steps) - 1 for run in (one, several)]
        causes = [f"The script trains {counts[0]} steps on one worker and {counts[1]} on several."]
    rows = zip(one.steps, several.steps, steps, strict=False)
    return {
        "outcome": outcome,
        "step": None if bad is None else bad.step,
        "causes": causes,
        "steps": [
            {
                "step": step.step,
                "loss": [before.logs.get("loss"), after.logs.get("loss")],
                "difference": step.whole,
                "reordered": step.reordered,
                "examples": step.of,
                "other_examples": step.examples,
                "faults": [[gap.name, gap.found, gap.explained] for gap in step.faults],
                "apart": step.apart,
            }
            for before, after, step in rows
        ],
    }


def _as_json(value: Any) -> Any:
    """Return `value` with None for nan and inf, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _as_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(found: dict[str, Any], np: int) -> Iterator[str]:
    """The table, and the verdict in words."""
    heads = f"{'loss, 1 worker':>15} {f'{np} workers':>12} {'difference':>11} {'reordered':>9}"
    yield f"{'step':>4} {'examples':>8} {heads}"
    for step in found["steps"][1:]:
        before, after = (f"{loss:.6g}" if loss is not None else "-" for loss in step["loss"])
        yield (
            f"{step['step']:>4} {step['examples'] or '-':>8} {before:>15} {after:>12} {step['difference']:>11.1e} "
            f"{step['reordered']:>9.1e}"
        )
    count = len(found["steps"]) - 1
    if found["outcome"] == "same":
        yield f"same: over {count} steps, {np} workers differ from one only by the order of summation"
        return
    if found["outcome"] == "unclear":
        yield (
            f"unclear: from step {found['step']} on, the result on one worker depends on the order of the examples in "
            "a batch"
        )
    elif found["step"] is None:
        yield "different"
    else:
        yield from _difference(found["steps"][found["step"]])
    yield from (f"likely cause: {cause}" for cause in found["causes"])


def _difference(step: dict[str, Any]) -> Iterator[str]:
    yield f"different: from step {step['step']} on"
    if step["other_examples"]:
        yield f"  {step['other_examples']} of {step['examples']} examples of the batch"
    faults: Sequence[Any] = step["faults"]
    for name, gap, explained in faults[:_SHOWN]:
        found = f"{gap:.1e} of its change" if gap < 1 else "more than its change"
        yield f"  {name}: {found}; the order of summation explains {explained:.1e}"
    if len(faults) > _SHOWN:
        yield f"  and {len(faults) - _SHOWN} more"
    if step["apart"]:
        yield f"  {step['apart'][0]}: different on the workers"
