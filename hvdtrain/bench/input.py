"""Input: examples a second that N workers of one thread read and decode, against one worker.

The workers read an epoch of the same files, each its part, and train nothing. One worker and all are timed one
after the other in each pass, for the machine's speed drifts; the ratio is taken within a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.bench.measurement import run_measurement

SCRIPT = Path(__file__).with_name("input_rank.py")
KINDS = ("png", "tfrecord")
RECORD_FILES = 8
SIDE = 96


@dataclass(frozen=True)
class InputPass:
    """Examples a second in one pass."""

    alone: float
    together: float

    @property
    def ratio(self) -> float:
        return self.together / self.alone


def write_files(folder: Path, kind: str, count: int) -> None:
    """Write `count` PNG images of SIDE x SIDE pixels: a file each, or as the records of RECORD_FILES files."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    writers = [
        tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord"))
        for number in range(RECORD_FILES if kind == "tfrecord" else 0)
    ]
    for number in range(count):
        # Half noise: PNG can squeeze neither nothing nor all out of it.
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
    kind: str,
    folder: Path,
    np: int,
    passes: int,
    launch: Callable[[int, Path, tuple[str, ...]], list[str]],
) -> Iterator[InputPass]:
    """Yield `passes` timings of reading the files in `folder`. Raises EngineError.

    Args:
        launch: composes the argv that runs a script with its arguments on so many ranks.
    """
    arguments = (f"--kind={kind}", f"--folder={folder}")
    for _ in range(passes):
        alone = run_measurement(launch(1, SCRIPT, arguments), {})
        together = run_measurement(launch(np, SCRIPT, arguments), {})
        yield InputPass(alone["examples_per_second"], together["examples_per_second"])
