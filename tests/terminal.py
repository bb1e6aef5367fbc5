"""Where tests look at what a launch shows."""

import io
from pathlib import Path
from typing import Any

from hvdtrain.launch.running.output import Output


class Terminal:
    """An Output with two buffers for a terminal."""

    def __init__(self, log_dir: Path, **view: Any) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.log_dir = log_dir
        self.output = Output(log_dir, self.out, self.err, **view)

    def run(self, stdout: bytes = b"", stderr: bytes = b"") -> "Terminal":
        with self.output:
            self.output.feed("stdout", stdout)
            self.output.feed("stderr", stderr)
            self.output.finish()
        return self

    def logged(self, name: str) -> bytes:
        return (self.log_dir / name).read_bytes()
