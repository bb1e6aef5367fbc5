"""`--profile`: which steps, the clocks of several machines, and what becomes of TensorFlow's and Horovod's records."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace
from thread_ranks import ThreadRanks, run_ranks, thread_ranks

import hvdtrain
from hvdtrain.collectives.clocks import clock_offsets, offsets_of
from hvdtrain.errors import UsageError
from hvdtrain.profiled_steps import MOST_STEPS, PROFILE, asked_steps, parse_steps
from hvdtrain.runtime import Rank, engine_environment
from hvdtrain.timeline_events import Events
from hvdtrain.trainer import profile as of_ranks
from hvdtrain.trainer.profile import Profile
from hvdtrain.trainer.profile_slices import (
    Slice,
    collective_slices,
    longest,
    nested,
    op_slices,
    phase_slices,
    trace_events,
)

GRADIENTS = {f"hvdtrain_gradient_0_{place}" for place in range(4)}
TIMELINES = Path(__file__).parent / "timelines"
MS = 1_000_000
"""In nanoseconds."""


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("100-110", (100, 110)),
        ("7", (7, 11)),
        ("3-3", (3, 3)),
        (f"1-{MOST_STEPS}", (1, MOST_STEPS)),
    ],
)
def test_steps(text: str, steps: tuple[int, int]) -> None:
    found = parse_steps(text)
    assert (found.first, found.last) == steps
    assert parse_steps(str(found)) == found == asked_steps({PROFILE: text})
    environ = {PROFILE: text, "HOROVOD_RANK": "0"}
    assert engine_environment(environ, "6.1")["HOROVOD_TIMELINE"] == "DYNAMIC"


@pytest.mark.parametrize(
    "text", ["", "0", "0-3", "110-100", "-5", "1-", "1:5", "x", "٣", "1-2-3", f"1-{MOST_STEPS + 1}", "9" * 30]
)  # fmt: skip
def test_no_steps(text: str) -> None:
    with pytest.raises(UsageError, match=r"not a range of steps|too many steps to profile"):
        parse_steps(text)
    if text:
        with pytest.raises(UsageError, match=f"^{PROFILE}: "):
            engine_environment({PROFILE: text}, "6.1")


def test_nothing_is_asked_for() -> None:
    assert asked_steps({}) is None
    assert "HOROVOD_TIMELINE" not in engine_environment({"HOROVOD_RANK": "0"}, "6.1")


def test_clocks_of_other_machines() -> None:
    """In each round all ranks leave after the last has entered; messages take up to 5 ms, and once only 0.2 ms."""
    rng = np.random.default_rng(0)
    ahead = np.array([0, 0, 3_600_000 * MS, 3_600_000 * MS, -2 * MS])
    enter = 10 * MS * np.arange(20)[:, None] + rng.integers(0, 5 * MS, (20, 5))
    late = rng.integers(MS, 5 * MS, (20, 5))
    enter[7], late[7] = enter[7].min(), MS // 5
    leave = enter.max(axis=1, keepdims=True) + late
    readings = [
        np.stack(pair, axis=1) for pair in zip((enter + ahead).T, (leave + ahead).T, strict=True)
    ]
    found = offsets_of(["a", "a", "b", "b", "c"], readings)
    assert found[:2] == [(0, 0)] * 2, "one machine, one clock"
    assert found[2] == found[3]
    for (offset, error), true in zip(found, ahead, strict=True):
        assert abs(offset - true) <= error <= MS // 5
    # Two ranks of a machine bound its clock more closely than one.
    alone = offsets_of(["a", "b"], [readings[0], readings[2]])
    assert found[2][1] <= alone[1][1]


def test_clocks_of_threads() -> None:
    assert run_ranks(thread_ranks(3), clock_offsets) == [[(0, 0)] * 3] * 3


def xspace() -> XSpace:
    """What TensorFlow's profiler writes of a host with a GPU, cut short."""
    space = XSpace()
    session = space.planes.add(name="Task Environment")
    session.stat_metadata[1].name = "profile_start_time"
    session.stats.add(metadata_id=1, uint64_value=1_000 * MS)
    space.planes.add(name="/host:metadata").lines.add(name="not shown").events.add()
    for plane_name, line_name, shown, op in (
        ("/host:CPU", "tf_Compute/42", "", "MatMul"),
        ("/device:GPU:0", "13", "Stream #13(Compute)", "gemm"),
    ):
        plane = space.planes.add(name=plane_name)
        plane.event_metadata[7].name = op
        line = plane.lines.add(name=line_name, display_name=shown, timestamp_ns=2 * MS)
        # The inner one ends with the outer one: rounded each by itself, it would end later.
        line.events.add(metadata_id=7, offset_ps=400, duration_ps=3_000_700)
        line.events.add(metadata_id=7, offset_ps=1_000_900, duration_ps=2_000_200)
    return space


def test_operations_on_threads_and_streams() -> None:
    begin = 1_002 * MS
    ends = [(begin, begin + 3001), (begin + 1000, begin + 3001)]
    assert [*op_slices(xspace())] == [
        *(Slice("tf_Compute/42", "MatMul", *times) for times in ends),
        *(Slice("GPU:0 Stream #13(Compute)", "gemm", *times) for times in ends),
    ]


def test_threads_of_one_name_have_a_track_each() -> None:
    space = xspace()
    (plane,) = (plane for plane in space.planes if plane.name == "/host:CPU")
    # It begins inside of an operation of the other thread, and outlasts it.
    line = plane.lines.add(name="tf_Compute/42", timestamp_ns=2 * MS)
    line.events.add(metadata_id=7, offset_ps=2_000_000, duration_ps=9_000_000)
    found = [*op_slices(space)]
    assert_nested(found)
    assert [one.track for one in found if one.name == "MatMul"] == [
        *2 * ["tf_Compute/42"],
        "tf_Compute/42 (2)",
    ]


def test_operations_that_overlap_get_a_track_each() -> None:
    times = [(0, 10), (2, 5), (4, 8), (5, 9), (9, 12), (12, 13), (12, 12)]
    found = [*nested(Slice("a", str(n), *both) for n, both in enumerate(times))]
    assert_nested(found)
    assert [(one.begin, one.end) for one in found] == sorted(times, key=lambda t: (t[0], -t[1]))
    assert {one.name for one in found if one.track == "a"} == {"0", "1", "3", "5", "6"}
    assert {one.name for one in found if one.track == "a #2"} == {"2", "4"}


def test_the_shortest_operations_are_left_out() -> None:
    slices = [Slice("a", str(length), 0, length) for length in (5, 1, 4, 1, 3)]
    kept, left_out = longest(lambda: slices, 3)
    assert ([one.name for one in kept], left_out) == (["5", "4", "3"], 2)
    assert longest(lambda: slices, 5) == (slices, 0)
    assert longest(lambda: [slices[1]] * 9, 2)[1] == 7, "however many are alike"


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_collectives_of_a_recorded_timeline(controller: str) -> None:
    """See test_timeline: five steps of a model with four weights, whose gradients travel together."""
    events = list(Events(TIMELINES / f"{controller}.json"))
    found = collective_slices(events)
    messages = [one for one in found if one.facts]
    gradients = [one for one in messages if one.name == "ALLREDUCE of 4 tensors"]
    assert len(gradients) == 5
    for one in gradients:
        assert one.facts is not None
        assert {name.split()[0] for name in one.facts["tensors"]} == GRADIENTS
    assert_nested(found)
    start = 1000 * events[0]["args"]["start_time_since_epoch_in_micros"]
    assert all(start < one.begin < one.end < start + 60_000 * MS for one in messages)
    reduced = [one for one in found if one.name == f"{controller.upper()}_ALLREDUCE"]
    assert len(reduced) >= 5
    for message in gradients:
        inside = [one for one in reduced if message.begin < one.begin < one.end <= message.end]
        assert len(inside) == 1


def test_messages_that_overlap_are_side_by_side() -> None:
    """As NCCL's do. The first event belongs to a tensor that began before the timeline."""

    def block(phase: str, tensor: int, now: int, name: str | None = None) -> dict[str, Any]:
        return {"ph": phase, "pid": tensor, "ts": now} | ({"name": name} if name else {})

    timeline = [
        {"ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 10}},
        block("E", 3, 0),
        *(block("B", 1, 1, "NEGOTIATE_ALLREDUCE"), block("E", 1, 2)),
        *(block("B", 1, 3, "ALLREDUCE"), block("B", 1, 4, "NCCL_ALLREDUCE")),
        *(block("B", 2, 5, "ALLREDUCE"), block("B", 2, 6, "NCCL_ALLREDUCE")),
        *(block("E", 1, 7), block("E", 1, 8), block("E", 2, 9), block("E", 2, 9)),
        block("B", 1, 20, "ALLREDUCE"),
    ]
    found = collective_slices(timeline)
    assert [(s.track, s.name, s.begin // 1000 - 10, s.end // 1000 - 10) for s in found] == [
        ("collectives", "ALLREDUCE", 1, 8),
        ("collectives", "negotiation", 1, 3),
        ("collectives", "NCCL_ALLREDUCE", 4, 7),
        ("collectives 2", "ALLREDUCE", 5, 9),
        ("collectives 2", "negotiation", 5, 5),
        ("collectives 2", "NCCL_ALLREDUCE", 6, 9),
    ]


def test_collectives_of_a_timeline_that_is_cut_off(tmp_path: Path) -> None:
    """Horovod's thread may have ended in the middle of an event."""
    text = (TIMELINES / "mpi.json").read_text()
    (tmp_path / "timeline.json").write_text(text[: len(text) // 2])
    whole = collective_slices(Events(TIMELINES / "mpi.json"))
    found = collective_slices(Events(tmp_path / "timeline.json"))
    messages = [[one for one in slices if one.facts] for slices in (found, whole)]
    assert messages[0] == messages[1][: len(messages[0])]
    assert 0 < len(messages[0]) < len(messages[1])


def test_a_trace_of_two_ranks() -> None:
    slices = [
        Slice("steps", "step 7", 5_000, 9_500, {"tensors": ["a"]}),
        *phase_slices([("input", "", 0.0, 0.001), ("training", "allreduce", 0.001, 0.002)], 5_000),
    ]
    parts = [trace_events(rank, f'node{rank} "a"', slices, 4_000) for rank in range(2)]
    events = json.loads(f"[{','.join(parts)}]")
    shown = [one for one in events if one["ph"] == "X"]
    assert [(one["pid"], one["name"], one["ts"], one["dur"]) for one in shown[:3]] == [
        (0, "step 7", 1, 4.5),
        (0, "data input", 1, 1000),
        (0, "training: allreduce", 1001, 1000),
    ]
    names = [one["args"]["name"] for one in events if one["name"].endswith("_name")]
    assert names == [
        'rank 0 (node0 "a")',
        "steps",
        "phases",
        'rank 1 (node1 "a")',
        "steps",
        "phases",
    ]


def test_ranks_whose_clocks_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that ends on all ranks together; rank 1's clock is an hour ahead, and its recording began earlier."""
    ahead = (0, 3_600_000 * MS, -MS)

    def recording(first: int, ranks: ThreadRanks) -> SimpleNamespace:
        own = ahead[ranks.rank()]
        begin = (50 - 7 * ranks.rank()) * MS + own
        bar = Slice("steps", f"step {first}", begin, 60 * MS + own)
        return SimpleNamespace(
            first=first,
            begin=begin,
            add_steps=lambda *_: None,
            slices=lambda most: ([bar] * most, ranks.rank()),
        )

    def work(ranks: ThreadRanks) -> None:
        profile = Profile(parse_steps("3-3"), Rank(ranks.rank(), 3, 0, 1), tmp_path, ranks)
        with profile.of_fit(2):
            list(profile.steps(iter([["a batch"]])))

    monkeypatch.setattr(of_ranks, "_Recording", recording)
    monkeypatch.setattr(of_ranks, "MOST_OPS", 6)
    monkeypatch.setattr(of_ranks, "clock_offsets", lambda _: [(one, MS // 2) for one in ahead])
    assert run_ranks(thread_ranks(3), work) == [None] * 3
    found = trace(tmp_path / "profile.json.gz")
    bars = [
        (one["pid"], one["ts"] / 1000, one["dur"] / 1000)
        for one in found["traceEvents"]
        if one["ph"] == "X"
    ]
    assert bars == [(0, 14, 10)] * 2 + [(1, 7, 17)] * 2 + [(2, 0, 24)] * 2
    assert found["otherData"]["operations_left_out"] == [0, 1, 2]
    said = ". Clock error at most 0.50 ms. 3 short TensorFlow operations are left out"
    assert caplog.messages[0].endswith(said)


def assert_nested(slices: list[Slice]) -> None:
    """The slices of a track are nested, or do not overlap: viewers draw others wrongly."""
    for track in {one.track for one in slices}:
        ends: list[int] = []
        own = [one for one in slices if one.track == track]
        for one in sorted(own, key=lambda one: (one.begin, -one.end)):
            while ends and ends[-1] <= one.begin:
                ends.pop()
            assert one.begin <= one.end <= (ends[-1] if ends else one.end), one
            ends.append(one.end)


def fit(folder: Path | None = None, **options: Any) -> None:
    """Train for six steps, in two epochs."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    trainer = hvdtrain.Trainer(model, "sgd", "mse", global_batch_size=4, run_dir=folder)
    trainer.fit(np.zeros((12, 3)), np.zeros((12, 1)), epochs=2, verbose=0, **options)


def trace(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


def test_a_fit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over the end of an epoch, with its validation."""
    monkeypatch.setenv(PROFILE, "3-4")
    fit(tmp_path, validation_data=(np.zeros((4, 3)), np.zeros((4, 1))))
    path = tmp_path / "profile.json.gz"
    assert caplog.messages == [f"Profile of steps 3-4: {path}, for https://ui.perfetto.dev"]
    found = trace(path)
    assert found["otherData"] == {
        "steps": "3-4",
        "clock_error_ms": [0],
        "operations_left_out": [0],
    }
    shown = [one for one in found["traceEvents"] if one["ph"] == "X"]
    steps = {one["name"]: one for one in shown if one["name"].startswith("step ")}
    assert steps.keys() == {"step 3", "step 4"}
    ops = [one for one in shown if "MatMul" in one["name"]]
    assert ops
    begin, end = steps["step 3"]["ts"], steps["step 4"]["ts"] + steps["step 4"]["dur"]
    assert 0 <= begin < end < 60e6
    for one in ops:
        # Both by the machine's clock, which TensorFlow reads in nanoseconds.
        assert begin <= one["ts"] <= one["ts"] + one["dur"] <= end
    assert {"data input", "training", "evaluation", "callbacks"} <= {one["name"] for one in shown}
    assert_nested(
        [
            Slice(
                one["tid"],
                one["name"],
                *(round(1000 * t) for t in (one["ts"], one["ts"] + one["dur"])),
            )
            for one in shown
        ]
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("7-8", "No profile of steps 7-8: this fit only trained steps 1 to 6"),
        ("5-9", "Profile of steps 5-6: profile.json.gz, for https://ui.perfetto.dev"),
    ],
)
def test_a_fit_that_ends_before(
    asked: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(PROFILE, asked)
    fit()
    assert caplog.messages == [said]
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json.gz"] * said.startswith("P")


def test_groups_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks see groups of two; an epoch has three steps."""
    monkeypatch.setenv(PROFILE, "5-6")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    options = {"global_batch_size": 4, "run_dir": tmp_path, "steps_per_execution": 2}
    trainer = hvdtrain.Trainer(model, "sgd", "mse", **options)
    trainer.fit(np.zeros((12, 3)), np.zeros((12, 1)), epochs=2, verbose=0)
    shown = [one["name"] for one in trace(tmp_path / "profile.json.gz")["traceEvents"]]
    assert [name for name in shown if name.startswith("step")] == ["steps 4 to 5", "step 6"]


def test_an_error_in_a_profiled_step_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise ZeroDivisionError

    monkeypatch.setenv(PROFILE, "1-4")
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, callbacks=[Fails()])
    assert not (tmp_path / "profile.json.gz").exists()
    tf.profiler.experimental.start("")
    tf.profiler.experimental.stop(save=False)


def test_another_profiler_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROFILE, "1-2")
    (tmp_path / ".tmp.profile.json.gz").mkdir()
    tf.profiler.experimental.start("")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit(tmp_path)
    finally:
        tf.profiler.experimental.stop(save=False)
    of_user = [str(one.message) for one in said if one.category is UserWarning]
    assert ["another profiler" in one for one in of_user] == [True, False]
    assert "cannot be written" in of_user[1]
