"""Profiles some steps of a fit on all ranks together: one trace of TensorFlow, the Trainer and Horovod's collectives.

Every rank records the same steps: TensorFlow's profiler its operations, the heartbeat its phases, and rank 0 Horovod's
timeline. Afterwards the ranks compare their clocks, and send their events to rank 0, which writes them to one file.
Without HVDTRAIN_PROFILE nothing of this happens.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.clocks import clock_offsets
from hvdtrain.collectives.communicator import ALL_RANKS, Communicator, Min
from hvdtrain.errors import warn_user
from hvdtrain.messages import logger
from hvdtrain.profiled_steps import ProfiledSteps
from hvdtrain.replaced_files import replacing
from hvdtrain.runtime import Rank
from hvdtrain.timeline_events import Events
from hvdtrain.trainer.profile_slices import (
    Slice,
    collective_slices,
    longest,
    op_slices,
    phase_slices,
    trace_events,
)
from hvdtrain.worker.heartbeat import in_phase, traced

FILE = "profile.json.gz"
MOST_OPS = 1_000_000
"""Maximum number of TensorFlow's operations in the file, over all ranks; the shortest are left out."""
_HOROVOD_SECONDS = 10.0
"""Time for Horovod to open or close its timeline."""
Group = TypeVar("Group", bound=Sequence[Any])


class Profile:
    """The profile of one fit.

    Args:
        asked: Steps to profile; None: none.
        rank: This rank.
        folder: Where rank 0 writes the file; None: in the current folder.
        ranks: Ranks that train together.
    """

    def __init__(
        self,
        asked: ProfiledSteps | None,
        rank: Rank,
        folder: Path | None,
        ranks: Communicator = ALL_RANKS,
    ) -> None:
        self._asked = asked
        self._rank = rank
        self._path = (folder or Path()) / FILE
        self._ranks = ranks
        self._done = 0
        self._recording: _Recording | None = None
        self._is_written = False

    @contextmanager
    def of_fit(self, done: int) -> Iterator[None]:
        """Profile the fit within this block. At its end a collective, unless it raises.

        Args:
            done: Number of steps that earlier processes of the run have trained.
        """
        if self._asked is None:
            yield
            return
        self._done = done
        try:
            yield
            if self._recording is not None:
                self._finish(self._recording)
            elif not self._is_written and self._rank.is_first:
                trained = f"steps {done + 1} to {self._done}" if self._done > done else "no step"
                logger().info(
                    "No profile of steps %s: this fit only trained %s", self._asked, trained
                )
        finally:
            if self._recording is not None:
                self._recording.drop()

    def steps(self, groups: Iterator[Group]) -> Iterator[Group]:
        """Return the data of an epoch's steps, and record the steps asked for. A collective after the last of them."""
        return groups if self._asked is None else self._watched(groups, self._asked)

    def _watched(self, groups: Iterator[Group], asked: ProfiledSteps) -> Iterator[Group]:
        begin = time.time_ns()
        for group in groups:
            before, self._done = self._done, self._done + len(group)
            is_first = before < asked.last and self._done >= asked.first and not self._is_written
            if is_first and self._recording is None:
                self._recording = _Recording(before + 1, self._ranks)
                begin = self._recording.begin
            yield group
            if self._recording is not None:
                self._recording.add_steps(before + 1, self._done, begin)
                if self._done >= asked.last:
                    self._finish(self._recording)
            begin = time.time_ns()

    def _finish(self, recording: _Recording) -> None:
        """Write what was recorded. A collective."""
        with in_phase("saving", "the profile"):
            slices, left_out = recording.slices(MOST_OPS // self._ranks.size())
            self._recording, self._is_written = None, True
            offsets = clock_offsets(self._ranks)
            own = self._ranks.rank()
            ahead, _ = offsets[own]
            # Viewers expect no negative times.
            begin = np.int64(min(one.begin for one in slices) - ahead)
            origin = int(self._ranks.allreduce(begin, "hvdtrain_profile_begin", Min)) + ahead
            events = zlib.compress(trace_events(own, socket.gethostname(), slices, origin).encode())
            sizes, dropped = zip(
                *self._ranks.exchange([len(events), left_out], "profile"), strict=True
            )
            # Only to rank 0, whose memory alone must hold them all.
            splits = np.array([len(events), *[0] * (self._ranks.size() - 1)], np.int32)
            sent = np.frombuffer(events, np.uint8)
            found = self._ranks.alltoall(sent, splits, "hvdtrain_profile_events").numpy().tobytes()
            if self._rank.is_first:
                ends = np.cumsum(sizes)
                parts = [found[end - size : end] for end, size in zip(ends, sizes, strict=True)]
                steps = f"{recording.first}-{self._done}"
                facts = {
                    "steps": steps,
                    "clock_error_ms": [error / 1e6 for _, error in offsets],
                    "operations_left_out": list(dropped),
                }
                self._write(parts, facts)

    def _write(self, parts: Sequence[bytes], facts: dict[str, Any]) -> None:
        try:
            with (
                replacing(self._path) as temporary,
                gzip.open(temporary, "wt", compresslevel=5, encoding="utf-8") as file,
            ):
                file.write(f'{{"otherData":{json.dumps(facts)},"traceEvents":[\n')
                for number, part in enumerate(parts):
                    file.write(",\n" * (number > 0) + zlib.decompress(part).decode())
                file.write("\n]}\n")
        except OSError as error:
            warn_user(f"{self._path} cannot be written: {error}. Training continues without it")
            return
        dropped, apart = sum(facts["operations_left_out"]), max(facts["clock_error_ms"])
        logger().info(
            "Profile of steps %s: %s, for https://ui.perfetto.dev%s%s",
            *(facts["steps"], self._path),
            f". Clock error at most {apart:.2f} ms" if apart else "",
            f". {dropped:,} short TensorFlow operations are left out" if dropped else "",
        )


class _Recording:
    """What this rank does from now on.

    Attributes:
        first: Number of the first step.
        begin: Time of the beginning in ns since 1970.
    """

    def __init__(self, first: int, ranks: Communicator) -> None:
        self.first = first
        self._steps: list[Slice] = []
        self._blocks = ExitStack()
        self._folder = Path(
            self._blocks.enter_context(TemporaryDirectory(prefix="hvdtrain-profile-"))
        )
        self._timeline = self._folder / "timeline.json"
        self._has_timeline = ranks.size() > 1 and ranks.rank() == 0 and _begin(self._timeline)
        _sync_gpus()
        try:
            tf.profiler.experimental.start(str(self._folder))
            self._has_ops = True
        except tf.errors.AlreadyExistsError:
            self._has_ops = False
            warn_user(
                "The profile has no TensorFlow operations of this rank, as another profiler runs: "
                "leave TensorBoard's profile_batch out"
            )
        self._spans = self._blocks.enter_context(traced())
        self.begin = time.time_ns()
        self._clock = self.begin - time.monotonic_ns()

    def add_steps(self, first: int, last: int, begin: int) -> None:
        """Add the bar of steps that callbacks see together, which began at the time `begin` and end now."""
        name = f"step {last}" if first == last else f"steps {first} to {last}"
        self._steps.append(Slice("steps", name, begin, time.time_ns()))

    def slices(self, most: int) -> tuple[list[Slice], int]:
        """End the recording; return its slices, and how many operations are left out so that at most `most` remain."""
        _sync_gpus()
        collectives: list[Slice] = []
        if self._has_timeline and _in_time(hvd.stop_timeline) and _has_events(self._timeline):
            collectives = collective_slices(Events(self._timeline))
        ops: list[Slice] = []
        left_out = 0
        if self._has_ops:
            # Not when this module is loaded: few trainings need it.
            from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

            self._has_ops = False
            tf.profiler.experimental.stop()
            for file in self._folder.rglob("*.xplane.pb"):  # One.
                space = XSpace.FromString(file.read_bytes())
                ops, left_out = longest(partial(op_slices, space), most)
        self._blocks.close()
        phases = phase_slices(self._spans, self._clock)
        return [*self._steps, *phases, *collectives, *ops], left_out

    def drop(self) -> None:
        """End the recording after an error: Horovod may have ended, and its timeline is left to it."""
        if self._has_ops:
            with suppress(tf.errors.OpError):
                tf.profiler.experimental.stop(save=False)
        self._blocks.close()


def _sync_gpus() -> None:
    """Wait until the GPUs have done what was launched: it belongs to the steps so far."""
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def _begin(timeline: Path) -> bool:
    """Let Horovod write a timeline from now on, as rank 0 alone can; return False, with a warning, if it cannot."""
    if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
        warn_user(
            "The profile has no collectives: Horovod was started without hvdtrain.init(), or writes HOROVOD_TIMELINE"
        )
        return False
    return _in_time(lambda: hvd.start_timeline(str(timeline)))


def _has_events(timeline: Path) -> bool:
    """Whether Horovod has written anything: it does so with the first collective."""
    return timeline.exists() and timeline.stat().st_size > 0


def _in_time(call: Callable[[], None]) -> bool:
    """Call a function of Horovod's that waits without limit for a thread, which may have ended; return if it ended."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(_HOROVOD_SECONDS)
    return not thread.is_alive()
