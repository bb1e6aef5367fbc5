"""The recording of a run: what rank 0 has noted after each of its first steps, in files that anything can read.

`facts.json` describes the run. `steps.jsonl` has a line for each step, whose arrays are in `step-N.npz`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FACTS, STEPS = "facts.json", "steps.jsonl"


@dataclass(frozen=True)
class RecordedStep:
    """The state after one step, or before the first one.

    Attributes:
        step: Number of steps trained so far.
        examples: Digest of each example of the global batch, in its order; empty before the first step.
        logs: Loss and metrics since the beginning of the epoch, over all workers; empty before the first step.
        arrays: Weights and state of the optimizer by name, as one process has them.
    """

    step: int
    examples: tuple[str, ...]
    logs: Mapping[str, float]
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Recording:
    """A recorded run.

    Attributes:
        facts: Its settings and warnings; see `step_recorder.recorded_fits`.
        steps: Its steps, the first of them the state before training.
    """

    facts: Mapping[str, Any]
    steps: Sequence[RecordedStep]


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write what describes the run. Values that JSON does not know are written as text."""
    (folder / FACTS).write_text(json.dumps(facts, default=str))


def write_step(folder: Path, step: RecordedStep) -> None:
    """Add one step to the recording in `folder`."""
    # By number: an array may have any name.
    np.savez(folder / f"step-{step.step}.npz", *map(_readable, step.arrays.values()))
    line = {"step": step.step, "examples": step.examples, "logs": dict(step.logs)}
    with (folder / STEPS).open("a") as file:
        file.write(json.dumps({**line, "names": list(step.arrays)}) + "\n")


def read_recording(folder: Path) -> Recording:
    """Read what `write_facts` and `write_step` have written to `folder`; without steps if it has none."""
    facts, lines = folder / FACTS, folder / STEPS
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    steps = []
    for row in rows:
        with np.load(folder / f"step-{row['step']}.npz", allow_pickle=False) as file:
            arrays = {name: file[f"arr_{number}"] for number, name in enumerate(row["names"])}
        steps.append(RecordedStep(row["step"], tuple(row["examples"]), row["logs"], arrays))
    return Recording(json.loads(facts.read_text()) if facts.exists() else {}, steps)


def _readable(array: np.ndarray) -> np.ndarray:
    # NumPy's files know bfloat16 as bytes.
    return array.astype(np.float32) if array.dtype.kind == "V" else array
