"""TensorBoard, through its own writer: TensorFlow's would run operations beside the training."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.trackers.tracker import RunFacts, require_package


class TensorBoard:
    """Writes event files for TensorBoard: values as scalars, settings as text; it shows no status.

    For histograms or the graph, use keras.callbacks.TensorBoard.

    Args:
        log_dir: Folder for the files. Default: "tensorboard" in the run_dir, or "logs" without a run_dir.

    Raises:
        UsageError: If tensorboard is not installed.
    """

    def __init__(self, log_dir: str | Path | None = None) -> None:
        require_package("tensorboard", "TensorBoard")
        self._log_dir = log_dir
        self._writer: Any = None

    def start(self, run: RunFacts) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        default = Path("logs") if run.run_dir is None else run.run_dir / "tensorboard"
        self._writer = EventFileWriter(str(self._log_dir or default))
        settings = json.dumps(run.config, indent=2, sort_keys=True, default=str)
        # Markdown shows indented lines as they are.
        text = "".join(f"    {line}\n" for line in settings.splitlines())
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        metadata = create_summary_metadata("config", "")
        self._add([Summary.Value(tag="config", metadata=metadata, tensor=tensor)], 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(
            [Summary.Value(tag=name, simple_value=value) for name, value in values.items()], step
        )

    def end(self, status: str) -> None:
        self._writer.close()

    def _add(self, values: list[Any], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        )
        self._writer.flush()
