"""The recording of a run: what the ranks have noted after each of its first steps, in files that anything can read.

Rank 0 writes `facts.json`, which describes the run, and `steps.jsonl`, a line for each step, whose arrays are in
`step-N.npz`. Each rank of several writes `replicas-RANK.jsonl`, with fingerprints of what all ranks should hold alike,
and `files-RANK.json`, the paths that it has written. No rank waits for another here: they may be out of step.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FACTS, STEPS = "facts.json", "steps.jsonl"
GRADIENT_OF = "gradient of "
"""Begins the name of an array that is the gradient of a variable, averaged over the ranks."""
ROUNDING = 1e-5
"""Relative difference of a variable between ranks up to which they hold the same: a GPU may add in any order."""


@dataclass(frozen=True)
class RecordedStep:
    """The state after one step, or before the first one.

    Attributes:
        step: Number of steps trained so far.
        examples: Digest of each example of the global batch, in its order; empty before the first step.
        logs: Loss and metrics since the beginning of the epoch, over all workers; empty before the first step.
        arrays: Weights and state of the optimizer by name, as one process has them.
        apart: Names of the variables that the ranks should hold alike, and do not. Not known of a Trainer.
    """

    step: int
    examples: tuple[str, ...]
    logs: Mapping[str, float]
    arrays: Mapping[str, np.ndarray]
    apart: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recording:
    """A recorded run.

    Attributes:
        facts: Its settings and warnings; see `step_recorder.recorded_fits`.
        steps: Its steps, the first of them the state before training.
        files: Paths that more than one rank has written.
    """

    facts: Mapping[str, Any]
    steps: Sequence[RecordedStep]
    files: tuple[str, ...] = ()


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write what describes the run. Values that JSON does not know are written as text."""
    (folder / FACTS).write_text(json.dumps(facts, default=str))


def write_replicas(folder: Path, rank: int, step: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Add fingerprints of what `rank` holds after `step` of variables that all ranks should hold alike."""
    values = {name: _fingerprint(array) for name, array in arrays.items()}
    with (folder / f"replicas-{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "values": values}) + "\n")


def write_files(folder: Path, rank: int, paths: Set[str]) -> None:
    """Write which files `rank` has written."""
    (folder / f"files-{rank}.json").write_text(json.dumps(sorted(paths)))


def write_step(folder: Path, step: RecordedStep) -> None:
    """Add one step to the recording in `folder`."""
    # By number: an array may have any name.
    np.savez(folder / f"step-{step.step}.npz", *map(_readable, step.arrays.values()))
    line = {"step": step.step, "examples": step.examples, "logs": dict(step.logs)}
    with (folder / STEPS).open("a") as file:
        file.write(json.dumps({**line, "names": list(step.arrays)}) + "\n")


def read_recording(folder: Path) -> Recording:
    """Read what the functions above have written to `folder`; without steps if it has none."""
    apart, steps = _apart(folder), []
    for row in _lines(folder / STEPS):
        with np.load(folder / f"step-{row['step']}.npz", allow_pickle=False) as file:
            arrays = {name: file[f"arr_{number}"] for number, name in enumerate(row["names"])}
        step, examples = row["step"], tuple(row["examples"])
        steps.append(RecordedStep(step, examples, row["logs"], arrays, apart.get(step, ())))
    lists = [json.loads(path.read_text()) for path in folder.glob("files-*.json")]
    writers = Counter(path for paths in lists for path in paths)
    files = tuple(path for path, ranks in writers.items() if ranks > 1)
    facts = folder / FACTS
    return Recording(json.loads(facts.read_text()) if facts.exists() else {}, steps, files)


def _apart(folder: Path) -> dict[int, tuple[str, ...]]:
    """Return, for each step, the names of the variables that some ranks hold otherwise than others."""
    found: dict[int, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("replicas-*.jsonl"):
        for row in _lines(path):
            for name, value in row["values"].items():
                found[row["step"]][name].append(value)
    return {
        step: tuple(name for name, values in replicas.items() if not _are_alike(values))
        for step, replicas in found.items()
    }


def _fingerprint(array: np.ndarray) -> tuple[float, float]:
    """Return the norm of an array, and a weighted sum, which two different arrays hardly share."""
    flat = array.astype(np.float64).ravel()
    return float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size)))


def _are_alike(values: Sequence[Sequence[float]]) -> bool:
    limit = ROUNDING * max(norm for norm, _ in values)
    return all(np.allclose(values[0], one, 0, limit, equal_nan=True) for one in values[1:])


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _readable(array: np.ndarray) -> np.ndarray:
    # NumPy's files know bfloat16 as bytes.
    return array.astype(np.float32) if array.dtype.kind == "V" else array
