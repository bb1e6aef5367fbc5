"""What the user sees of a run, and what is kept of it.

By default the terminal shows rank 0's standard output as if the script ran alone. Standard error is
shown of all ranks, without TensorFlow's greetings, and what several ranks say alike is shown once.
Everything is in `<log dir>/rank.N/{stdout,stderr}`, and what horovodrun and mpirun say in `<log
dir>/launcher.log`. Processes that are no ranks (see `members`) are treated alike; the first of them
is rank 0 here. What cannot be written any more, files or terminal, is said once and left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from hvdtrain.launch.running.members import RANKS, Members
from hvdtrain.launch.running.noise import is_noise, without_stamp
from hvdtrain.launch.running.sinks import LogFiles, Screen
from hvdtrain.launch.running.streams import Piece, PlainReader, Stream, TagReader
from hvdtrain.worker.failure import Failure, from_line

# A line, or the part of one up to a carriage return (a progress bar's), with its end.
_SEGMENT = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
_LAUNCHER_TAIL = 64 * 1024
_LARGEST_MEMORY = 10_000


@dataclass
class Output:
    """Sorts a run's output into terminal and files. Use as a context manager: it opens files.

    Attributes:
        log_dir: an existing folder.
        stdout, stderr: where the user looks.
        all_ranks: show every rank's output, each line with its rank in front.
        show_launcher: show what horovodrun and mpirun say as well.
        stamp: gives what is put in front of each line of a rank, in the files too; None is nothing.
        members: what the ranks are called.
        unread: whether nobody reads one of the two streams any more.
        failures: what ranks reported, in the order of arrival.
        launcher_text: the end of what horovodrun and mpirun said.
    """

    log_dir: Path
    stdout: BinaryIO
    stderr: BinaryIO
    all_ranks: bool = False
    show_launcher: bool = False
    stamp: Callable[[], bytes] | None = None
    members: Members = RANKS
    unread: bool = False
    failures: list[Failure] = field(default_factory=list)
    launcher_text: bytes = b""
    _logs: LogFiles = field(init=False)
    _screens: dict[Stream, Screen] = field(init=False)
    _readers: dict[Stream, TagReader | PlainReader] = field(default_factory=dict)
    _pending: dict[tuple[int, Stream], bytes] = field(default_factory=dict)
    _mid_line: set[int] = field(default_factory=set)
    _said: dict[int, Counter[bytes]] = field(default_factory=dict)
    _shown: Counter[bytes] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._logs = LogFiles(self.log_dir, self._say_logs_lost)
        self._screens = {
            "stdout": Screen(self.stdout, lambda error: self._lose("stdout", error)),
            "stderr": Screen(self.stderr, lambda error: self._lose("stderr", error)),
        }

    def __enter__(self) -> Output:
        reader = TagReader if self.members.tagged else PlainReader
        self._readers = {"stdout": reader("stdout"), "stderr": reader("stderr")}
        return self

    def __exit__(self, *exception: object) -> None:
        self._logs.close()

    def feed(self, stream: Stream, data: bytes) -> None:
        """Take what horovodrun wrote to `stream`."""
        for piece in self._readers[stream].feed(data):
            self._take(piece)

    def settle(self) -> None:
        """Nothing more came for a moment: unfinished lines may be shown."""
        for reader in self._readers.values():
            for piece in reader.finish():
                self._take(piece)
        if not self.all_ranks:
            rest = self._pending.pop((0, "stderr"), b"")
            if rest and not is_noise(rest):
                rest = self._stamped(0, "stderr", rest)
                self._log(0, "stderr", rest)
                self._mid_line.add(0)
                self._write("stderr", rest)
            elif rest:
                self._pending[0, "stderr"] = rest

    def finish(self) -> None:
        """The run has ended: show the rest."""
        self.settle()
        for (rank, stream), rest in sorted(self._pending.items()):
            self._show_segment(rank, stream, rest)
        self._pending.clear()

    def say(self, text: str) -> None:
        """Tell the user something, in lines of their own."""
        self._write("stderr", f"{text}\n".encode(errors="backslashreplace"))

    def leave_terminal(self) -> None:
        """Show no more, not even to wait for a reader that has halted."""
        for screen in self._screens.values():
            screen.leave()

    def _take(self, piece: Piece) -> None:
        if piece.rank is None:
            self._take_launcher(piece)
        elif piece.stream == "stdout" and not self.all_ranks and not self.stamp:
            self._log(piece.rank, "stdout", piece.data)
            if piece.rank == 0:
                self._write("stdout", piece.data)
        else:
            key = (piece.rank, piece.stream)
            data = self._pending.pop(key, b"") + piece.data
            end = 0
            for segment in _SEGMENT.finditer(data):
                # A carriage return at the very end may be the first half of a line's end.
                self._show_segment(piece.rank, piece.stream, segment[0])
                end = segment.end()
            if data[end:]:
                self._pending[key] = data[end:]

    def _show_segment(self, rank: int, stream: Stream, segment: bytes) -> None:
        """Log and perhaps show one line (or part of a progress bar) of a rank."""
        line = segment.rstrip(b"\r\n")
        failure = from_line(line.decode(errors="replace")) if stream == "stderr" else None
        if failure is not None:
            if self.members.is_vital(rank):
                # Only ranks know their numbers.
                self.failures.append(replace(failure, rank=rank) if self.members.roles else failure)
            else:
                self._write("stderr", self._labelled(rank, f"{failure.text}\n".encode()))
            self._log(rank, "stderr", f"{failure.text}\n".encode())
            return
        stamped = self._stamped(rank, stream, segment)
        self._log(rank, stream, stamped)
        if self.all_ranks:
            if line and not (stream == "stderr" and is_noise(line)):
                self._write(stream, self._labelled(rank, stamped.rstrip(b"\r\n")) + b"\n")
        elif stream == "stdout":
            if rank == 0:
                self._write("stdout", stamped)
        elif rank in self._mid_line:
            self._mid_line.discard(rank)
            self._write("stderr", segment)
        elif not is_noise(line) and (rank == 0 or segment.endswith(b"\n")):
            self._show_once(rank, line, stamped)

    def _labelled(self, rank: int, line: bytes) -> bytes:
        return b"[%s] %s" % (self.members.label(rank).encode(), line)

    def _stamped(self, rank: int, stream: Stream, segment: bytes) -> bytes:
        """What was begun before (only rank 0's standard error is shown so) has its stamp."""
        begun = stream == "stderr" and rank in self._mid_line
        return segment if self.stamp is None or begun else self.stamp() + segment

    def _show_once(self, rank: int, line: bytes, segment: bytes) -> None:
        """The k-th time that any rank says this is shown; the k-th times of the others are not."""
        text = without_stamp(line)
        said = self._said.setdefault(rank, Counter())
        said[text] += 1
        if said[text] > self._shown[text]:
            self._shown[text] += 1
            if line or rank == 0:
                self._write("stderr", segment if rank == 0 else self._labelled(rank, segment))
        if len(self._shown) > _LARGEST_MEMORY:
            self._shown.clear()
            self._said.clear()

    def _take_launcher(self, piece: Piece) -> None:
        self.launcher_text = (self.launcher_text + piece.data)[-_LAUNCHER_TAIL:]
        self._log(None, piece.stream, piece.data)
        if self.show_launcher:
            self._write("stderr", piece.data)

    def _log(self, rank: int | None, stream: Stream, data: bytes) -> None:
        name = "launcher.log" if rank is None else f"{self.members.folder(rank)}/{stream}"
        self._logs.append(name, data)

    def _write(self, stream: Stream, data: bytes) -> None:
        self._screens[stream].show(data)

    def _say_logs_lost(self, error: OSError) -> None:
        self.say(
            f"\ncannot keep the output in {self.log_dir}: {error.strerror}; the run goes on without it"
        )

    def _lose(self, stream: Stream, error: OSError) -> None:
        """One of the two streams cannot be written to any more."""
        if isinstance(error, BrokenPipeError):
            self.unread = True
        elif stream == "stdout":
            self.say(
                f"\ncannot write standard output: {error.strerror}; the run goes on, its output is in "
                f"{self.log_dir}"
            )
