"""The program of `hvdtrain estimate`: runs a script as rank 0 of N up to its first Trainer.fit.

    python -m hvdtrain.estimate.planned_fit RANKS RANKS_PER_HOST REPORT SCRIPT [ARGUMENTS]...

It creates the model and its optimizer and traces the training step, but trains nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.worker.main_module import run_script

if TYPE_CHECKING:
    from hvdtrain.collectives.mesh import Position
    from hvdtrain.estimate.planned_engine import SimulatedHorovod
    from hvdtrain.parallel.layout import Layout
    from hvdtrain.strategies.runner import Runner
    from hvdtrain.trainer.loop import Loop
    from hvdtrain.trainer.plans import FitPlan

BYTES_PER_OPERATION = 16_000
"""Memory of an operation in the step's graph, in Python, in TensorFlow and in its executor."""


class _Found(BaseException):
    """Ends the script when the estimate is written; a BaseException, so that `except Exception` does not catch it."""


def main() -> None:
    """Run the script up to its first fit; exit with another code than 0 if no report is written."""
    ranks, per_host, report, script = sys.argv[1:5]
    sys.argv = sys.argv[4:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    # As set by a launcher; must precede any import of hvdtrain that reads it.
    place = {"RANK": "0", "SIZE": ranks, "LOCAL_RANK": "0", "LOCAL_SIZE": per_host}
    os.environ.update({f"HOROVOD_{name}": value for name, value in place.items()})
    from hvdtrain.estimate.planned_engine import SimulatedHorovod

    engine = SimulatedHorovod(int(ranks), int(per_host))
    engine.install()
    _stop_at_fit(engine, Path(report))
    try:
        run_script(script)
    except _Found:
        return
    except HvdtrainError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if Path(report).exists():  # The script caught the exception that was to end it.
        return
    print(
        "Error: the script ended without calling fit on an hvdtrain.Trainer, the step of which is estimated",
        file=sys.stderr,
    )
    sys.exit(UsageError.exit_code)


def _stop_at_fit(engine: SimulatedHorovod, report: Path) -> None:
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    from hvdtrain.collectives.step_context import current_step
    from hvdtrain.trainer import strategy_choice
    from hvdtrain.trainer.loop import Loop

    strategy_choice.RUNNERS["pipeline"] = "hvdtrain.estimate.planned_fit:only_stage"
    apply = BaseOptimizer.apply

    def fit(loop: Loop, plan: FitPlan) -> NoReturn:
        BaseOptimizer.apply = apply
        report.write_text(json.dumps(_estimate(loop, plan, engine)))
        raise _Found

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if current_step() is not None:  # Traced to choose the number of micro-batches.
            return apply(*args, **kwargs)
        raise UsageError(
            "The script trains without hvdtrain.Trainer.fit, or before calling it. Only the step of a Trainer can be "
            "estimated, not model.fit or a custom loop: create a Trainer for the same model to see its figures"
        )

    Loop.fit = fit  # type: ignore[method-assign, assignment]
    BaseOptimizer.apply = refuse


def only_stage(layout: Layout, position: Position) -> Runner:
    """Return the runner of micro-batches; raise UsageError if there are several stages."""
    if layout.mesh.pipeline > 1:
        raise UsageError(
            "A pipeline cannot be estimated: its stages differ, and none of them runs its step as a single graph. "
            "Estimate the model without it: a stage holds the weights, gradients and state of its own layers"
        )
    from hvdtrain.parallel.pipeline.stage_runner import StageRunner

    return StageRunner(layout, position)


def _estimate(loop: Loop, plan: FitPlan, engine: SimulatedHorovod) -> dict[str, Any]:
    """Return this rank's memory and the traffic of its training step, in bytes, as JSON types.

    Raises:
        UsageError: If the step is not one graph on each rank, or runs eagerly.
    """
    import tensorflow as tf

    from hvdtrain.data import split
    from hvdtrain.keras_internals.variables import bytes_of, optimizer_variables
    from hvdtrain.parallel.pipeline.fitting_count import SHARES
    from hvdtrain.parallel.pipeline.stage_steps import PipelineSteps
    from hvdtrain.parallel.step_memory import count_operations, peak_bytes, step_bytes
    from hvdtrain.strategies.rank_steps import RankSteps
    from hvdtrain.trainer.setup import symbolic_data

    if not isinstance(loop.steps, RankSteps | PipelineSteps):
        raise UsageError(
            f"strategy {loop.strategy.name} cannot be estimated: its step is not a single graph on each rank"
        )
    if loop.model.run_eagerly:
        raise UsageError("run_eagerly=True creates no graph to estimate: leave it out")
    part = loop.strategy.part
    begin, end = split(loop.record.config["global_batch_size"], part.index, part.count)
    micro_batches, kept = 1, 1
    if isinstance(loop.steps, PipelineSteps):
        micro_batches = min(loop.steps.count, end - begin)
        kept = min(loop.steps.in_memory, micro_batches)
    specs = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype),
        symbolic_data(plan.train.element, -(-(end - begin) // micro_batches)),
    )
    engine.messages.clear()
    graph = loop.steps.trace(specs)
    model = loop.model
    weights = bytes_of(model.variables)
    state = bytes_of(optimizer_variables(model))
    batch = sum(
        (leaf.shape.num_elements() or 0) * leaf.dtype.size for leaf in tf.nest.flatten(specs)
    )
    gradients = bytes_of(model.trainable_variables)
    peak = peak_bytes(graph)
    operations = count_operations(graph)
    sent: Counter[str] = Counter()
    for message in engine.messages:
        sent[message.kind] += round(message.wire_bytes)
    return {
        "examples": end - begin,
        "memory": {
            "weights": weights,
            "optimizer state": state,
            **step_bytes(peak, gradients, micro_batches, kept),
            "fusion buffer": _fusion([m.bytes or 0 for m in engine.messages]),
            "graph": operations * BYTES_PER_OPERATION,
            "input": batch * micro_batches * SHARES,
        },
        "resident": max(0, psutil.Process().memory_info().rss - weights - state),
        "sent": dict(sent),
        "messages": len(engine.messages),
        "unknown_messages": sum(message.bytes is None for message in engine.messages),
    }


def _fusion(sizes: list[int]) -> int:
    """Return the largest use of Horovod's fusion buffer in bytes: all small tensors of a step are ready at once."""
    from hvdtrain.parallel.pipeline.fitting_count import fusion_limit

    limit = fusion_limit(os.environ)
    fused = [size for size in sizes if size < limit]
    return min(limit, sum(fused)) if len(fused) > 1 else 0


if __name__ == "__main__":
    main()
