"""One rank of a memory measurement: the peak of its resident memory while it trains a large model.

Started by memory.py. A tiny model of the same kind is trained first, so that code, threads and buffers are
there; then the kernel's mark of the highest resident size is set back, and the large model is made and trained
for three steps. Rank 0 reports {"peak_of_ranks": [bytes above the size before], "parameters"}.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
from pathlib import Path
from typing import Any

BATCH = 32
STEPS = 3
TINY = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["data", "zero", "tensor", "pipeline"])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True, help="file for rank 0's report")
    arguments = parser.parse_args()
    train(arguments.way, arguments.ranks, TINY, arguments.blocks)
    before = restart_mark()
    trained = train(arguments.way, arguments.ranks, arguments.width, arguments.blocks)
    peak = status("VmHWM") - before

    from hvdtrain.collectives.communicator import ALL_RANKS

    peaks = ALL_RANKS.exchange(peak, "peak")
    if trained.rank.is_first:
        parameters = arguments.blocks * (8 * arguments.width**2 + 5 * arguments.width)
        arguments.report.write_text(json.dumps({"peak_of_ranks": peaks, "parameters": parameters}))


def train(way: str, ranks: int, width: int, blocks: int) -> Any:
    """Train a stack of blocks, Dense(4 width) and Dense(width), for some steps; return the Trainer."""
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


def restart_mark() -> int:
    """Give free memory back, set the kernel's mark to the present size, and return that in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None, name
    return int(found.group(1)) * 1024


if __name__ == "__main__":
    main()
