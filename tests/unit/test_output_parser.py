"""Whose bytes are these? Whatever ranks write, and however it arrives, each gets back its own."""

import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminal import Terminal

from hvdtrain.environment import TERMINAL
from hvdtrain.launch.running.line_splitter import LONGEST, Lines
from hvdtrain.launch.running.log_filter import is_noise, may_be_noise, without_stamp
from hvdtrain.launch.running.output import LINES_AT_ONCE
from hvdtrain.launch.running.output_parser import TagReader
from hvdtrain.start.parts.output_tags import atoms, marked
from hvdtrain.worker.failure_report import LONGEST_LINE, Failure
from hvdtrain.worker.output_frames import Unframer, frame

REPOSITORY = Path(__file__).parents[2]
# Text like tags and line ends, and any bytes.
HOSTILE = st.lists(
    st.sampled_from(
        [
            b"[0]<stdout>:",
            b"[1,0]<stdout>:",
            b"[1]<stderr+>:",
            b"[1,",
            b"[",
            b"\n",
            b"\r",
            b"\r\n",
            b"\xff",
        ]
    )
    | st.binary(max_size=5),
    max_size=8,
).map(b"".join)
WRITTEN = st.lists(st.tuples(st.integers(0, 11), HOSTILE), max_size=12)
CUTS = st.lists(st.integers(0, 10_000))
_MPI_TAG = re.compile(rb"\[\d+,\d+\]<(stdout|stderr|stddiag)>:")


def chunks(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def by_rank(data: bytes, cuts: Iterable[int], is_slow: bool = False) -> dict[int | None, bytes]:
    """What the reader attributes to each rank when `data` arrives in pieces cut at `cuts`.

    `is_slow`: nothing comes for a moment after each of them.
    """
    reader = TagReader("stdout")
    found: dict[int | None, bytes] = {}
    pieces = []
    for chunk in chunks(data, cuts):
        pieces += [*reader.feed(chunk), *(reader.pause() if is_slow else ())]
    for piece in [*pieces, *reader.finish()]:
        found[piece.rank] = found.get(piece.rank, b"") + piece.data
    return found


def mpirun(written: Iterable[tuple[int, bytes]]) -> bytes:
    """What mpirun makes of it: a tag in front of each piece, and of each line in it."""
    return b"".join(
        b"[1,%d]<stdout>:%s" % (rank, line)
        for rank, text in written
        for line in re.findall(rb"[^\n]*\n|[^\n]+", text)
    )


def together(written: Iterable[tuple[int, bytes]]) -> dict[int | None, bytes]:
    expected: dict[int | None, bytes] = {}
    for rank, text in written:
        if text:
            expected[rank] = expected.get(rank, b"") + text
    return expected


@given(WRITTEN, CUTS, st.booleans())
def test_marked_output_comes_back_byte_for_byte(
    written: list[tuple[int, bytes]], cuts: list[int], is_slow: bool
) -> None:
    data = b"".join(marked(text, rank, 1) for rank, text in written)
    assert by_rank(data, cuts, is_slow) == together(written)


@given(WRITTEN)
def test_marked_lines_go_out_in_parts_that_no_other_writer_breaks(
    written: list[tuple[int, bytes]],
) -> None:
    lines = b"".join(marked(text * 99, rank, 1) for rank, text in written)
    parts = list(atoms(lines))
    assert b"".join(parts) == lines
    assert all(len(part) <= 4096 and part.endswith(b"\n") for part in parts if part)


@given(WRITTEN, CUTS)
def test_over_mpi_too_but_for_tags_inside_lines(
    written: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    written = [(rank, _MPI_TAG.sub(b"", text)) for rank, text in written]
    # A tag may also be cut in two by a piece's end, and a line may begin like a frame.
    written = [(rank, re.sub(rb"[<\x10]", b"", text)) for rank, text in written]
    assert by_rank(mpirun(written), cuts) == together(written)


@given(
    st.lists(st.tuples(st.integers(0, 11), HOSTILE.map(lambda text: text * 40)), max_size=9),
    CUTS,
    st.booleans(),
)
def test_frames_come_back_from_mpirun_byte_for_byte(
    written: list[tuple[int, bytes]], cuts: list[int], is_slow: bool
) -> None:
    """mpirun reads any part of what there is, and has room for twice of what it reads."""
    streams: dict[int, bytes] = {}
    for rank, text in written:
        if text:
            streams[rank] = streams.get(rank, b"") + frame(text)
    pieces = []
    sizes = itertools.cycle([1 + cut % 4096 for cut in cuts] or [4096])
    while streams:
        for rank in list(streams):
            size = next(sizes)
            pieces.append((rank, streams[rank][:size]))
            assert len(mpirun(pieces[-1:])) <= 8192
            if not (rest := streams.pop(rank)[size:]):
                continue
            streams[rank] = rest
    assert by_rank(mpirun(pieces), cuts, is_slow) == together(written)


def test_the_beginning_of_a_frame_at_the_very_end_is_text() -> None:
    assert by_rank(b"[1,0]<stdout>:a\n[1,0]<stdout>:\x10", []) == {0: b"a\n\x10"}


def test_short_frames_fit_with_their_tags() -> None:
    many = b"".join(frame(b"%d\n" % (number % 10)) for number in range(4096))
    assert all(
        len(mpirun([(99_999, many[at : at + 4096])])) <= 8192 for at in range(0, 40_960, 4096)
    )


def test_a_rank_writes_in_frames_where_mpirun_tags(tmp_path: Path) -> None:
    """Its children too, and to the end; the script does not see the helper among its own processes."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "print('<one>')\n"
        "subprocess.run(['sh', '-c', 'echo two; echo three >&2'])\n"
        "try:\n    os.wait()\nexcept ChildProcessError:\n    print('alone')\n"
        "subprocess.Popen(['sleep', '60'])\n"
        "print('x' * 1_000_000)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    names = {TERMINAL: "0", "OMPI_MCA_orte_tag_output": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hvdtrain.worker", str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **names},
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == -9
    assert b"<" not in done.stdout
    assert Unframer().feed(done.stdout) == b"<one>\ntwo\nalone\n" + b"x" * 1_000_000 + b"\n"
    assert Unframer().feed(done.stderr) == b"three\n"


@given(CUTS)
def test_what_looks_like_a_tag_at_a_lines_beginning_is_the_ranks_own(cuts: list[int]) -> None:
    text = b"[1,1]<stdout>:[1,0]<stderr>:mine\n[0]<stdout>:mine too [0]<stdout>:\n"
    assert by_rank(mpirun([(2, text), (1, b"x\n")]), cuts) == {2: text, 1: b"x\n"}


@pytest.mark.parametrize("tag", [b"[1,%d]<stdout>:", b"[%d]<stdout>:"])
def test_the_launchers_own_words(tag: bytes) -> None:
    words = b"--------\nmpirun noticed\n"
    data = words + tag % 0 + b"0 2 [3.]\n" + words + tag % 1 + b"x\n"
    assert by_rank(data, []) == {0: b"0 2 [3.]\n", 1: b"x\n", None: words * 2}


@given(HOSTILE.map(lambda text: text * 3), CUTS, st.integers(2, 20))
def test_lines_do_not_depend_on_the_chunks(text: bytes, cuts: list[int], longest: int) -> None:
    def lines(pieces: list[bytes]) -> list[tuple[bytes, bool, bool]]:
        cutter = Lines(longest=longest)
        found = [block for piece in pieces for block in cutter.feed(piece)]
        return [
            (line, block.begins, block.ends)
            for block in [*found, *cutter.finish()]
            for line in block.data.splitlines(keepends=True)
        ]

    whole = lines([text])
    assert lines(chunks(text, cuts)) == whole
    assert b"".join(data for data, *_ in whole) == text
    assert all(len(data) <= longest for data, *_ in whole)


@pytest.mark.parametrize("view", [{}, {"all_ranks": True}, {"stamp": lambda: b"12:00 "}])
@given(written=WRITTEN, errors=WRITTEN, cuts=CUTS)
def test_what_comes_out_does_not_depend_on_the_chunks(
    tmp_path_factory: pytest.TempPathFactory,
    view: dict[str, object],
    written: list[tuple[int, bytes]],
    errors: list[tuple[int, bytes]],
    cuts: list[int],
) -> None:
    stdout = b"".join(marked(text, rank, 1) for rank, text in written)
    stderr = b"".join(marked(text, rank, 2) for rank, text in errors)
    seen = []
    for out, err in (([stdout], [stderr]), (chunks(stdout, cuts), chunks(stderr, cuts))):
        terminal = Terminal(tmp_path_factory.mktemp("log"), **view)
        with terminal.output as output:
            for data in out:
                output.feed("stdout", data)
            for data in err:
                output.feed("stderr", data)
            output.finish()
        seen.append((terminal.out.getvalue(), terminal.err.getvalue()))
    assert seen[0] == seen[1]
    if "stamp" not in view:
        for name, wrote in (("stdout", written), ("stderr", errors)):
            for rank, text in together(wrote).items():
                assert terminal.logged(f"rank.{rank}/{name}") == text


SAID = st.lists(
    st.sampled_from(
        [
            *(
                b"one\n",
                b"two\r\n",
                b"10%\r",
                b"begun ",
                b"\n",
                b"\r",
                b"I",
                b"Killed\n",
                b"To enable ",
            ),
            *(b"W0000 00:00:%d.2 3 a.cc:1] careful\n" % second for second in (1, 2)),
            b"I0000 00:00:1.2 3 port.cc:1] oneDNN custom operations are on\n",
            *(b"2026-01-01 00:00:0%d,123 INFO step\n" % second for second in (1, 2)),
        ]
    )
    | st.binary(max_size=5),
    max_size=6,
).map(b"".join)


def line_by_line(written: Iterable[tuple[int, bytes]], all_ranks: bool) -> bytes:
    """What is shown of standard error, in the plainest way."""
    held: dict[int, bytes] = defaultdict(bytes)
    said: dict[int, Counter[bytes]] = defaultdict(Counter)
    kept: dict[int, bool] = defaultdict(lambda: True)
    most, seen = Counter[bytes](), []

    def take(rank: int, line: bytes, seen_already: bool = False) -> None:
        text = line.rstrip(b"\r\n")
        if is_noise(text) or (rank and not all_ranks and not line.endswith(b"\n")):
            return
        if not all_ranks:
            if text:
                alike = without_stamp(line)
                said[rank][alike] += 1
                kept[rank] = said[rank][alike] > most[alike]
                most[alike] = max(most[alike], said[rank][alike])
            if not kept[rank] or seen_already:
                return
        if rank == 0 and not all_ranks:
            seen.append(line)
        elif text:
            seen.append(b"[%d] %s\n" % (rank, text))

    for rank, text in written:
        *lines, rest = [*(held[rank] + text).splitlines(keepends=True), b""]
        if lines and not lines[-1].endswith(b"\n"):
            rest = lines.pop()
        held[rank] = rest
        for line in lines:
            take(rank, line)
    if early := bool(held[0]) and not all_ranks and not may_be_noise(held[0]):
        seen.append(held[0])
    for rank, rest in sorted(held.items()):
        if rest:
            take(rank, rest, seen_already=early and rank == 0)
    return b"".join(seen)


@pytest.mark.parametrize("all_ranks", [False, True])
@given(written=st.lists(st.tuples(st.integers(0, 2), SAID), max_size=12), cuts=CUTS)
def test_blocks_are_shown_as_each_line_of_them_would_be(
    tmp_path_factory: pytest.TempPathFactory,
    all_ranks: bool,
    written: list[tuple[int, bytes]],
    cuts: list[int],
) -> None:
    terminal = Terminal(tmp_path_factory.mktemp("log"), all_ranks=all_ranks)
    with terminal.output as output:
        for data in chunks(b"".join(marked(text, rank, 2) for rank, text in written), cuts):
            output.feed("stderr", data)
        output.finish()
    assert terminal.err.getvalue() == line_by_line(written, all_ranks)
    for rank, text in together(written).items():
        assert terminal.logged(f"rank.{rank}/stderr") == text


def test_a_flood_is_shown_as_it_is(tmp_path: Path) -> None:
    """With its noise and echoes, but for failures and other ranks' progress bars."""
    flood = b"again\nKilled\n10%\r20%\r\n" * LINES_AT_ONCE
    failure = Failure(1, 1, False, "no disk")
    told = failure.to_line().encode() + b"\n"
    stderr = marked(flood, 0, 2) + marked(flood + told + flood, 1, 2)
    terminal = Terminal(tmp_path).run(stderr=stderr)
    shown = b"[1] again\n[1] Killed\n[1] 20%\n" * LINES_AT_ONCE
    assert terminal.err.getvalue() == flood + shown * 2
    assert terminal.output.failures == [failure]
    assert terminal.logged("rank.0/stderr") == flood
    assert terminal.logged("rank.1/stderr") == flood + b"no disk\n" + flood


@pytest.mark.parametrize("view", [{}, {"all_ranks": True}, {"stamp": lambda: b"12:00 "}])
@pytest.mark.parametrize("text", [b"x", b"[1,", b"\r[0]<", b"@hvdtrain-failure {"])
def test_a_line_that_never_ends_is_passed_on(
    tmp_path: Path, view: dict[str, object], text: bytes
) -> None:
    """Little of it is held back: more only of what begins as a failure's report does."""
    text *= 2 * LONGEST_LINE // len(text) if text[0] == b"@"[0] else 1_000_000 // len(text)
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        terminal = Terminal(tmp_path / stream, **view)
        terminal.log_dir.mkdir()
        data = marked(text, 0, descriptor)
        begun = time.monotonic()
        with terminal.output as output:
            for at in range(0, len(data), 65536):
                output.feed(stream, data[at : at + 65536])  # type: ignore[arg-type]
            shown = len((terminal.out if stream == "stdout" else terminal.err).getvalue())
            assert shown > len(text) - 2 * LONGEST
            # Quadratic work would take hours; this allows for a busy machine.
            assert time.monotonic() - begun < 20
            output.finish()
        if "stamp" not in view:
            assert terminal.logged(f"rank.0/{stream}") == text
