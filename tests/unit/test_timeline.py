"""`hvdtrain timeline`: recorded timelines, fabricated ones, and files that are none."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdtrain import timeline_events
from hvdtrain.cli.timeline import timeline
from hvdtrain.errors import EngineError, UsageError
from hvdtrain.report.timeline import Summary, read_timeline
from hvdtrain.report.timeline_advice import MOST, advice
from hvdtrain.report.timeline_chart import TENSORS_SHOWN, short_name

RECORDED = Path(__file__).parent / "timelines"
GRADIENTS = {f"hvdtrain_gradient_0_{place}" for place in range(4)}


class Writer:
    """Writes as Horovod does: all in one line, but for the names of tensors. Times are in seconds."""

    def __init__(self) -> None:
        self.text = '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": {"start": 1}},\n'
        self._pids: dict[str, int] = {}

    def event(self, phase: str, tensor: str, now: float, **more: object) -> None:
        known = tensor in self._pids
        pid = self._pids.setdefault(tensor, len(self._pids) + 1)
        if not known:
            named = {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": tensor}}
            self.text += json.dumps(named) + ",\n"
        self.text += json.dumps({"ph": phase, "ts": round(1e6 * now), "pid": pid, **more}) + ","

    def block(self, phase: str, tensors: list[str], now: float, name: str = "") -> None:
        for tensor in tensors:
            self.event(phase, tensor, now, **({"name": name} if name else {}))

    def negotiate(
        self, tensors: list[str], begin: float, ready: dict[int, float], end: float
    ) -> None:
        self.block("B", tensors, begin, "NEGOTIATE_ALLREDUCE")
        for rank, now in ready.items():
            for tensor in tensors:
                self.event("X", tensor, now, name=str(rank), dur=0)
        self.block("E", tensors, end)

    def operate(self, tensors: list[str], begin: float, **seconds: float) -> None:
        """An operation on tensors that travel together, with activities of that many seconds."""
        self.block("B", tensors, begin, "ALLREDUCE")
        for name, length in seconds.items():
            self.block("B", tensors, begin, name)
            begin += length
            self.block("E", tensors, begin)
        for tensor in tensors:
            self.event("E", tensor, begin, args={"dtype": "float32", "shape": "[1000, 250]"})

    def cycle(self, now: float) -> None:
        self.text += (
            json.dumps({"ph": "i", "name": "CYCLE_START", "ts": round(1e6 * now), "s": "g"}) + ","
        )

    def read(self, folder: Path, cut: int = 1, end: str = "]") -> Summary:
        file = folder / "timeline.json"
        file.write_text(self.text[:-cut] + end)
        return read_timeline(file)


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_recorded_timeline(controller: str) -> None:
    """Five steps of a model with four weights on two ranks: hvdtrain run -np 2 --controller gloo --cycle-time-ms 50
    --timeline-filename gloo.json --timeline-mark-cycles train.py"""
    found = read_timeline(RECORDED / f"{controller}.json")
    gradients = {tensor.name: tensor for tensor in found.tensors if tensor.name in GRADIENTS}
    assert gradients.keys() == GRADIENTS
    assert {name: t.operations for name, t in gradients.items()} == dict.fromkeys(GRADIENTS, 5)
    assert sum(t.bytes for t in gradients.values()) == 5 * 4 * (8 * 16 + 16 + 16 + 1)
    assert all(t.seconds["communication"] > 0 for t in gradients.values())
    assert found.seconds > found.in_flight >= max(found.busy.values()) > 0
    assert found.messages[4] >= 1, "the gradients were fused"
    assert 0.045 < (found.cycle_seconds or 0) < 0.2
    assert (found.ranks, found.last.keys()) == (2, {0, 1})
    assert found.damaged == 0
    assert 1 <= len(advice(found)) <= MOST


def test_times_bytes_and_messages(tmp_path: Path) -> None:
    file = Writer()
    file.cycle(0.5)
    file.negotiate(["a", "b"], 1.0, {0: 1.0, 1: 1.5}, 2.0)
    file.operate(["a", "b"], 2.0, QUEUE=0.5, MEMCPY_IN_FUSION_BUFFER=0.25, NCCL_ALLREDUCE=1.0)
    file.cycle(3.5)
    file.operate(["c"], 4.0, GLOO_ALLREDUCE=2.0, ALLOCATE_OUTPUT=0.5)
    found = file.read(tmp_path)
    assert found.busy == {
        "negotiation": 1.0,
        "queue": 0.5,
        "copies": 0.25,
        "communication": 3.0,
        "other": 0.5,
    }
    assert [t.name for t in found.tensors] == ["a", "b", "c"]
    assert [sum(t.seconds.values()) for t in found.tensors] == [2.75, 2.75, 2.5]
    assert (found.seconds, found.in_flight) == (6.0, 5.25)
    assert (found.operations, found.bytes) == (3, 3_000_000)
    assert found.messages == {1: 1, 2: 1}
    assert (found.cycles, found.cycles_used, found.cycle_seconds) == (2, 2, 3.0)
    # Both wait at the same time.
    assert (found.last, found.waits) == ({1: 2}, {1: 0.5})


def test_only_negotiations_that_show_all_ranks_say_who_came_last(tmp_path: Path) -> None:
    """Of a tensor in Horovod's cache a mark may be missing."""
    file = Writer()
    file.negotiate(["a"], 1.0, {0: 1.0, 2: 1.25, 1: 2.0}, 2.0)
    file.negotiate(["a"], 3.0, {0: 3.0}, 9.0)
    file.negotiate(["a"], 10.0, {}, 11.0)
    found = file.read(tmp_path)
    assert (found.ranks, found.last, found.waits) == (3, {1: 1}, {1: 1.0})


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_timeline_that_is_cut_off_anywhere(controller: str, tmp_path: Path) -> None:
    whole = (RECORDED / f"{controller}.json").read_text()
    for end in range(len(whole) - 200, len(whole), 7):
        (tmp_path / "cut.json").write_text(whole[:end])
        found = read_timeline(tmp_path / "cut.json")
        assert found.operations > 30
        assert found.damaged <= 2, "half of an event, and the object in it"


def test_what_has_begun_went_on_until_the_end(tmp_path: Path) -> None:
    file = Writer()
    file.operate(["a"], 1.0, MPI_ALLREDUCE=1.0)
    file.block("B", ["a"], 2.0, "ALLREDUCE")
    file.block("B", ["a"], 2.0, "MPI_ALLREDUCE")
    file.cycle(5.0)
    found = file.read(tmp_path, cut=20, end="")
    assert found.unfinished == 1
    assert found.damaged == 1, "half of the last event"
    assert found.busy["communication"] == 1.0
    assert file.read(tmp_path).busy["communication"] == 4.0


def test_damage_is_passed_over_and_counted(tmp_path: Path) -> None:
    file = Writer()
    file.operate(["a"], 1.0, MPI_ALLREDUCE=1.0)
    file.text += (
        '{"ph": "B", "na\x00,{"ph": "E", "pid": 7, "ts": 1},{"ph": "B", "ts": NaN, "pid": 1},'
    )
    file.text += '{"ph": "X", "name": "1", "ts": 3, "pid": 1},{"ph": [], "ts": 3},{"ph": "E", "ts": -1, "pid": 1},'
    file.text += (
        '{"ph": "E", "ts": 1' + 5000 * "0" + ', "pid": 1},{"a": ' * 900 + "1" + 900 * "}" + ","
    )
    file.operate(["a"], 3.0, MPI_ALLREDUCE=1.0)
    found = file.read(tmp_path)
    assert (found.operations, found.busy["communication"]) == (2, 2.0)
    assert found.damaged > 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("[]", "contains no Horovod operations"),
        ('{"traceEvents": []}', "not a Horovod timeline"),
        ("[" + 2000 * '{"a": 1},', "not a Horovod timeline"),
        ("[" + 5000 * '{"a":', "not a Horovod timeline"),
        ("[" + 40_000 * '{"a', "not a Horovod timeline"),
        ('[{"ph": "M"},' + 40_000 * '{"ph":', "1,000 objects in a row"),
        ("\x7fELF\xff", "not a Horovod timeline"),
    ],
)
def test_other_files_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=says):
        read_timeline(tmp_path / "file")


def test_a_timeline_that_was_started_anew(tmp_path: Path) -> None:
    first, second = Writer(), Writer()
    first.operate(["a", "b"], 1.0, MPI_ALLREDUCE=1.0)
    second.operate(["b", "c"], 5.0, MPI_ALLREDUCE=1.0)
    first.text += second.text
    found = first.read(tmp_path)
    assert {t.name: t.operations for t in found.tensors} == {"a": 1, "b": 2, "c": 1}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_timeline(tmp_path / "none.json")


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_events, "PIECE", 2**16)
    file = Writer()
    for number in range(100):
        file.negotiate(["a"], number, {0: number, 1: number + 0.5}, number + 0.5)
        file.operate(["a"], number + 0.5, MPI_ALLREDUCE=0.5)
    path, repeats = tmp_path / "long.json", 50
    begin, events = file.text.split('"a"}},', 1)
    path.write_text(begin + '"a"}},' + repeats * events)
    assert path.stat().st_size > 2_000_000
    tracemalloc.start()
    found = read_timeline(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.operations == 100 * repeats
    assert peak < 1_000_000


def slow_rank(file: Writer) -> None:
    file.negotiate(["a"], 1.0, {0: 1.0, 1: 3.0}, 3.0)
    file.operate(["a"], 3.0, MPI_ALLREDUCE=0.1)


def long_cycles(file: Writer) -> None:
    for number in range(10):
        file.cycle(number)
        file.negotiate(["a"], number, {}, number + 0.9)
        file.operate(["a"], number + 0.9, MPI_ALLREDUCE=0.01)


def ranks_in_turns(file: Writer) -> None:
    for number in range(10):
        file.negotiate(["a"], number, {0: number, 1: number + 0.5}, number + 0.5)
        file.negotiate(["a"], number + 0.5, {1: number + 0.5, 0: number + 1}, number + 1)


def copies(file: Writer) -> None:
    file.operate(["a", "b"], 1.0, MEMCPY_IN_FUSION_BUFFER=1.0, MPI_ALLREDUCE=1.0)


def small_messages(file: Writer) -> None:
    file.operate(["a"], 1.0, MPI_ALLREDUCE=1.0)
    file.text = file.text.replace("[1000, 250]", "[10]")


def much_to_send(file: Writer) -> None:
    file.operate(["a"], 1.0, MPI_ALLREDUCE=1.0)


def nothing(file: Writer) -> None:
    file.operate(["a"], 1.0, MPI_ALLREDUCE=0.1)
    file.operate(["a"], 10.0, MPI_ALLREDUCE=0.1)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (slow_rank, ["Rank 1 came last in 1 of 1 negotiations, and the others waited 2 s"]),
        (
            long_cycles,
            ["on average 900 ms, about as long as a cycle of 1e+03 ms: try --cycle-time"],
        ),
        (ranks_in_turns, ["no single rank is usually the last"]),
        (
            copies,
            ["Copies into and out of the fusion buffer take 1 s", "takes 1 of 2 s, at 0.002 GB/s"],
        ),
        (small_messages, ["1 messages of 0.04 kB on average"]),
        (much_to_send, ["Communication takes 1 of 1 s, at 0.001 GB/s: send less"]),
        (nothing, ["Horovod was busy for 0.2 of 9.1 s, and no figure stands out"]),
    ],
)
def test_advice(case: object, says: list[str], tmp_path: Path) -> None:
    file = Writer()
    case(file)  # type: ignore[operator]
    found = advice(file.read(tmp_path))
    assert len(found) == len(says)
    for sentence, words in zip(found, says, strict=True):
        assert words in sentence


def test_what_is_printed(tmp_path: Path) -> None:
    file = Writer()
    file.negotiate(["a"], 1.0, {0: 1.0, 1: 1.5}, 2.0)
    file.operate(["a", 80 * "long" + "_end", "\x1b[2J"], 2.0, MPI_ALLREDUCE=1.0)
    file.read(tmp_path)
    shown = CliRunner().invoke(timeline, [str(tmp_path / "timeline.json")])
    assert shown.exit_code == 0, shown.output
    assert "2.000 s, 3 operations on 3 tensors, 3.000 MB" in shown.output
    assert "communication      1.000 s 50.0 %" in shown.output
    assert "1 messages of 3 tensors and 3,000.0 kB on average" in shown.output
    assert (
        "Last of 2 ranks, in the 1 negotiations with all ranks: rank 1 1 times (0.5 s)"
        in shown.output
    )
    assert "longlong_end " in shown.output
    assert "\x1b" not in shown.output


def test_json_and_no_tensorflow() -> None:
    code = (
        "import sys; from hvdtrain.cli.command_table import main; main(standalone_mode=False); "
        "assert {'tensorflow', 'keras', 'numpy', 'horovod'}.isdisjoint(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "timeline", "--json", str(RECORDED / "mpi.json")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {tensor["name"] for tensor in found["tensors"]} > GRADIENTS
    assert found["advice"]


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_chart_shows_what_the_text_says(controller: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    file = RECORDED / f"{controller}.json"
    done = CliRunner().invoke(timeline, [str(file), "--output", str(path)])
    assert (done.exit_code, f"wrote {path}" in done.output) == (0, True)
    drawn, summary = path.read_text(), read_timeline(file)
    # matplotlib draws text as paths, and keeps it in comments.
    for tensor in summary.tensors[:TENSORS_SHOWN]:
        assert short_name(tensor.name, 44) in drawn
    for rank, times in summary.last.items():
        assert f"rank {rank}" in drawn
        assert f"{times:,} times" in drawn
    for kind, seconds in summary.busy.items():
        assert kind in drawn
        assert f"{100 * seconds / summary.seconds:.1f} %" in drawn


def test_a_chart_of_one_rank_and_of_names_that_hurt(tmp_path: Path) -> None:
    writer = Writer()
    writer.operate(["$x_{1}$ <&>\x07" + "long" * 50], 1.0, MPI_ALLREDUCE=0.5)
    (tmp_path / "timeline.json").write_text(writer.text)
    chart = tmp_path / "chart.png"
    done = CliRunner().invoke(timeline, [str(tmp_path / "timeline.json"), "-o", str(chart)])
    assert done.exit_code == 0
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("chart.pdf", "expected a name that ends with .png or .svg"),
        ("no/chart.png", "does not exist"),
    ],
)
def test_a_chart_that_cannot_be_written_is_refused(name: str, says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(timeline, [str(RECORDED / "mpi.json"), "-o", str(tmp_path / name)])
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)
    assert not done.output


def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "chart.png").symlink_to("/dev/full")
    options = [str(RECORDED / "mpi.json"), "-o", str(tmp_path / "chart.png")]
    done = CliRunner().invoke(timeline, options)
    assert isinstance(done.exception, EngineError)
    assert "cannot be written: No space left" in str(done.exception)
