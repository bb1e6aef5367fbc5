"""One rank of a timing of input: it reads and decodes its part of an epoch of images, with one thread.

Started by input.py. Rank 0 reports {"examples_per_second": of all ranks, by the slowest}.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from hvdtrain.bench.core import take_core

GLOBAL_BATCH = 64
SIZE = 160


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--report", type=Path, required=True, help="file for rank 0's report")
    arguments = parser.parse_args()
    from hvdtrain.runtime import init

    rank = init()
    take_core(rank.local_rank)
    from hvdtrain.collectives.communicator import ALL_RANKS, Max
    from hvdtrain.data import from_files, make_source

    read = image if arguments.kind == "png" else decoded
    files = from_files(f"{arguments.folder}/*.{arguments.kind}", read)
    source = make_source(files, global_batch_size=GLOBAL_BATCH, shuffle=True, seed=0, threads=1)
    next(iter(source.epoch(0, rank.rank, rank.size)))
    ALL_RANKS.allreduce(0.0, "hvdtrain_bench_begin")
    begin = time.perf_counter()
    for _ in source.epoch(1, rank.rank, rank.size):
        pass
    seconds = ALL_RANKS.allreduce(time.perf_counter() - begin, "hvdtrain_bench_seconds", Max)
    if rank.is_first:
        assert source.examples is not None
        rate = source.examples / float(seconds)
        arguments.report.write_text(json.dumps({"examples_per_second": rate}))


def image(path: Any) -> Any:
    import tensorflow as tf

    return decoded(tf.io.read_file(path))


def decoded(content: Any) -> Any:
    """A picture as for training: enlarged, turned in its colours, normalised. About 3 ms."""
    import tensorflow as tf

    pixels = tf.image.decode_png(content, channels=3)
    large = tf.image.resize(pixels, (SIZE, SIZE), method="bicubic", antialias=True) / 255.0
    turned = tf.image.adjust_saturation(tf.image.adjust_hue(large, 0.1), 1.2)
    return tf.image.per_image_standardization(turned)


if __name__ == "__main__":
    main()
