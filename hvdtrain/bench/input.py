"""Times the input pipeline: examples per second that N single-threaded workers read and decode, against one.

The workers read an epoch of the same files, each its own share, and train nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.bench.measurement import Comparison, Launch, report, run_measurement, take_core

KINDS = ("png", "tfrecord")
RECORD_FILES = 8
SIDE = 96
TRAINED_SIDE = 160
GLOBAL_BATCH = 64


def write_files(folder: Path, kind: str, count: int) -> None:
    """Write `count` PNG images of SIDE x SIDE pixels: a file each, or as the records of RECORD_FILES TFRecord files."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    writers = [
        tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord"))
        for number in range(RECORD_FILES if kind == "tfrecord" else 0)
    ]
    for number in range(count):
        # Half noise, half one value, so that PNG compresses it, but not to nothing.
        image = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        image[SIDE // 2 :] = number % 256
        content = tf.io.encode_png(image).numpy()
        if writers:
            writers[number % len(writers)].write(content)
        else:
            (folder / f"{number:06d}.png").write_bytes(content)
    for writer in writers:
        writer.close()


def measure_input(
    kind: str, folder: Path, np: int, passes: int, launch: Launch
) -> Iterator[Comparison]:
    """Yield examples per second of one worker and of `np` workers in each pass.

    Raises:
        EngineError: If a measurement failed.
    """
    options = {"kind": kind, "folder": str(folder)}

    def rate(ranks: int) -> float:
        found = run_measurement(launch, ranks, Path(__file__), options)
        return float(found["examples_per_second"])

    for _ in range(passes):
        yield Comparison(rate(1), rate(np))


def read_epoch(kind: str, folder: str) -> dict[str, float] | None:
    """Read an epoch on one rank; rank 0 returns the examples per second of all, by the slowest rank's time."""
    from hvdtrain.runtime import init

    rank = init()
    take_core(rank.local_rank)
    from hvdtrain.collectives.communicator import ALL_RANKS, Max
    from hvdtrain.data import from_files, make_source

    files = from_files(f"{folder}/*.{kind}", image if kind == "png" else decoded)
    source = make_source(files, global_batch_size=GLOBAL_BATCH, shuffle=True, seed=0, threads=1)
    next(iter(source.epoch(0, rank.rank, rank.size)))
    ALL_RANKS.allreduce(0.0, "hvdtrain_bench_begin")
    begin = time.perf_counter()
    for _ in source.epoch(1, rank.rank, rank.size):
        pass
    seconds = ALL_RANKS.allreduce(time.perf_counter() - begin, "hvdtrain_bench_seconds", Max)
    assert source.examples is not None
    return {"examples_per_second": source.examples / float(seconds)} if rank.is_first else None


def image(path: Any) -> Any:
    """Read and decode a PNG file; see `decoded`."""
    import tensorflow as tf

    return decoded(tf.io.read_file(path))


def decoded(content: Any) -> Any:
    """Decode a PNG image and prepare it as for training: resize, adjust colours, normalize. About 3 ms."""
    import tensorflow as tf

    pixels = tf.image.decode_png(content, channels=3)
    size = (TRAINED_SIDE, TRAINED_SIDE)
    large = tf.image.resize(pixels, size, method="bicubic", antialias=True) / 255.0
    turned = tf.image.adjust_saturation(tf.image.adjust_hue(large, 0.1), 1.2)
    return tf.image.per_image_standardization(turned)


if __name__ == "__main__":
    report(read_epoch)
