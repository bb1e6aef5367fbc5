"""Measures the peak memory of a rank while it trains, against the size of weights, gradients and optimizer state.

Plain training of n float32 parameters with Adam, whose state is two values per parameter, takes 16 n bytes. Sharded
state (ZeRO-1; Rajbhandari et al. 2020, section 5.1) takes 8 n + 8 n / N on each of N ranks. Layers that are split over
N ranks, or divided into N stages, take 16 n / N. The measured peak also includes activations (kept small by a small
batch), communication buffers, and temporary memory of operations.

A rank first trains a tiny model of the same kind, so that code, threads and buffers are loaded. Then it resets the
kernel's record of the peak resident size, and builds and trains the large model for three steps.
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.bench.measurement import Launch, report, run_measurement

FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Variables that make malloc return freed memory at once: otherwise its caching would be measured."""
MEGABYTE = 1e6
BATCH = 32
STEPS = 3
TINY = 16


class Case(NamedTuple):
    """One way to train: "data" (whole optimizer state), "zero", "tensor" or "pipeline", on a number of ranks."""

    way: str
    ranks: int


CASES = {
    f"{way}-{ranks}": Case(way, ranks)
    for way, ranks in (
        ("data", 1), ("data", 2), ("zero", 2), ("zero", 4), ("tensor", 2), ("tensor", 4), ("pipeline", 2),
    )
}  # fmt: skip
"""Name in `hvdtrain bench memory --case` -> case."""


class Theory(NamedTuple):
    """The bytes that one rank needs for weights, gradients and optimizer state."""

    weights: float
    gradients: float
    state: float


def theory(case: Case, parameters: int) -> Theory:
    """Return the bytes that one rank needs for a model of so many float32 parameters that Adam trains."""
    model = 4.0 * parameters
    if case.way in ("data", "zero"):
        return Theory(model, model, 2 * model / (case.ranks if case.way == "zero" else 1))
    return Theory(model / case.ranks, model / case.ranks, 2 * model / case.ranks)


def parameters_of(width: int, blocks: int) -> int:
    """Return the number of parameters of a stack of blocks, each Dense(4 width) and Dense(width)."""
    return blocks * (8 * width**2 + 5 * width)


def measure_peaks(case: Case, launch: Launch, width: int, blocks: int) -> list[int]:
    """Train for a few steps; return the peak of each rank, in bytes above its size before the model was built.

    Raises:
        EngineError: If the training failed.
    """
    options = {"way": case.way, "ranks": case.ranks, "width": width, "blocks": blocks}
    found = run_measurement(launch, case.ranks, Path(__file__), options, FREED_AT_ONCE)
    return list(found["peak_of_ranks"])


HEADER = ("way", "ranks", "weights", "gradients", "state", "sum", "measured", "ratio")


def row(case: Case, parameters: int, peaks: list[int]) -> tuple[str, ...]:
    """Return a line of the table, in megabytes (10^6 bytes), for the rank with the highest peak."""
    wanted = theory(case, parameters)
    total, most = sum(wanted), max(peaks)
    figures = (f"{size / MEGABYTE:,.0f}" for size in (*wanted, total, most))
    return (case.way, str(case.ranks), *figures, f"{most / total:.2f}")


def peak(way: str, ranks: int, width: int, blocks: int) -> dict[str, list[int]] | None:
    """Train on one rank; rank 0 returns the peaks of all ranks."""
    train(way, ranks, TINY, blocks)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak to the present size.
    before = resident("VmRSS")
    trained = train(way, ranks, width, blocks)
    mine = resident("VmHWM") - before

    from hvdtrain.collectives.communicator import ALL_RANKS

    peaks = ALL_RANKS.exchange(mine, "peak")
    return {"peak_of_ranks": peaks} if trained.rank.is_first else None


def train(way: str, ranks: int, width: int, blocks: int) -> Any:
    """Train a stack of blocks, Dense(4 width) and Dense(width), for STEPS steps; return the Trainer."""
    import keras
    import numpy as np

    import hvdtrain

    options: dict[str, Any] = {}
    if way == "zero":
        options["shard_optimizer"] = True
    elif way == "tensor":
        split = {"up_.*": "column", "down_.*": "row"}
        options["layout"] = hvdtrain.Layout(hvdtrain.Mesh(tensor=ranks), split=split)
    elif way == "pipeline":
        options["layout"] = hvdtrain.Layout(hvdtrain.Mesh(pipeline=ranks), micro_batches=4)

    def model() -> keras.Model:
        layers: list[Any] = [keras.layers.Input((width,))]
        for block in range(blocks):
            layers.append(keras.layers.Dense(4 * width, activation="relu", name=f"up_{block}"))
            layers.append(keras.layers.Dense(width, name=f"down_{block}"))
        return keras.Sequential(layers)

    trainer = hvdtrain.Trainer(
        model, keras.optimizers.Adam(1e-4), "mse", global_batch_size=BATCH, **options
    )
    data = np.zeros((STEPS * BATCH, width), "float32")
    trainer.fit((data, data), epochs=1, verbose=0)
    return trainer


def resident(name: str) -> int:
    """Return the resident size of this process in bytes: VmRSS (now) or VmHWM (peak) in /proc/self/status."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None, name
    return int(found.group(1)) * 1024


if __name__ == "__main__":
    report(peak)
