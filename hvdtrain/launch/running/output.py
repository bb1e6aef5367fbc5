"""Decide which output of a run is shown, and save all of it.

By default, the terminal shows rank 0's standard output as if the script ran alone. It shows standard
error of all ranks, without TensorFlow's start-up messages, and repetitions among ranks only once.
Everything is saved in `<log dir>/rank.N/{stdout,stderr}`, and the output of horovodrun and mpirun in `<log
dir>/launcher.log`. Processes other than ranks (see `process_names`) are treated alike; the first counts as
rank 0 here. If the files or the terminal can no longer be written, this is reported once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from hvdtrain.launch.running.line_splitter import LONGEST, Block, Lines
from hvdtrain.launch.running.live_rows import LiveRows
from hvdtrain.launch.running.log_filter import Echoes, may_be_noise, without_noise
from hvdtrain.launch.running.log_folder import running_in
from hvdtrain.launch.running.output_parser import Piece, PlainReader, Stream, TagReader
from hvdtrain.launch.running.output_writers import FAREWELL_SECONDS, LogFiles, Screen
from hvdtrain.launch.running.process_names import RANKS, ProcessNames
from hvdtrain.worker.failure_report import LONGEST_LINE, MARKER, Failure, encoded, from_line

_MARKER = MARKER.encode()
_LAUNCHER_TAIL = 64 * 1024
LINES_AT_ONCE = 250
"""Maximum lines of standard error per read of the launch's pipe (64 kB) that are searched for noise and echoes. More
lines than that are a flood, which the search would slow down; the rest is shown unfiltered."""


@dataclass
class _Source:
    """One stream of one rank.

    Attributes:
        rank: The rank.
        stream: The stream.
        lines: Splitter of the stream into lines.
        logged, shown: Number of bytes of the held line already written to the file and to the screen.
        hidden: Whether the current line is not shown.
        stamp: Time stamp of the current line or block.
    """

    rank: int
    stream: Stream
    lines: Lines
    logged: int = 0
    shown: int = 0
    hidden: bool = False
    stamp: bytes = b""


@dataclass
class Output:
    """Sorts a run's output into terminal and files. Use as a context manager, as it opens files.

    Attributes:
        log_dir: Existing folder for the files.
        stdout, stderr: Streams that the user sees.
        all_ranks: Whether to show every rank's output, each line prefixed with its rank.
        show_launcher: Whether to show the output of horovodrun and mpirun as well.
        stamp: Function that returns a prefix for each line of a rank, in the files too. None adds nothing.
        process_names: Names of the ranks.
        view: Live view below the output; None if there is none.
        on_news: Function called with each line of news about a rank, from the process that started it.
        unread: Whether one of the two streams no longer has a reader.
        failures: Failures reported by ranks, in order of arrival.
        launcher_text: End of the output of horovodrun and mpirun.
    """

    log_dir: Path
    stdout: BinaryIO
    stderr: BinaryIO
    all_ranks: bool = False
    show_launcher: bool = False
    stamp: Callable[[], bytes] | None = None
    process_names: ProcessNames = RANKS
    view: LiveRows | None = None
    on_news: Callable[[bytes], None] = lambda line: None
    unread: bool = False
    failures: list[Failure] = field(default_factory=list)
    launcher_text: bytes = b""
    _logs: LogFiles = field(init=False)
    _screens: dict[Stream, Screen] = field(init=False)
    _readers: dict[Stream, TagReader | PlainReader] = field(default_factory=dict)
    _sources: dict[tuple[int, Stream], _Source] = field(default_factory=dict)
    _news: dict[int, bytes] = field(default_factory=dict)
    _begun: dict[Stream, bool] = field(default_factory=dict)  # Whether a line is unfinished.
    _one_terminal: bool = False
    _echoes: Echoes = field(default_factory=Echoes)
    _looked_at: int = 0
    _running: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._logs = LogFiles(self.log_dir, self._say_logs_lost)
        self._one_terminal = self.stdout.isatty() and self.stderr.isatty()
        self._screens = {
            "stdout": Screen(self.stdout, lambda error: self._lose("stdout", error)),
            "stderr": Screen(self.stderr, lambda error: self._lose("stderr", error)),
        }
        if self.view is not None and self._one_terminal:
            # In one queue, so that the view is out of the way before anything else is written.
            self._screens["stderr"] = self._screens["stdout"]

    def __enter__(self) -> Output:
        reader = TagReader if self.process_names.tagged else PlainReader
        self._readers = {"stdout": reader("stdout"), "stderr": reader("stderr")}
        self._running.enter_context(running_in(self.log_dir))
        return self

    def __exit__(self, *exception: object) -> None:
        self._close_view()
        while self.is_behind:
            self.catch_up(FAREWELL_SECONDS)
        self._logs.close()
        self._running.close()

    def feed(self, stream: Stream, data: bytes) -> None:
        """Process data that the launcher wrote to `stream`."""
        self._looked_at = 0
        for piece in self._readers[stream].feed(data):
            self._take(piece)
        self._flush()

    def settle(self) -> None:
        """Show unfinished lines, after a moment without output."""
        for reader in self._readers.values():
            for piece in reader.pause():
                self._take(piece)
        for source in self._sources.values():
            held = source.lines.held
            if held and not (source.lines.begins and _may_be_failure(source, held)):
                self._keep(source, Block(held, source.lines.begins, ends=False))
                source.logged = len(held)
                self._show_held(source, held)
        if self.view is not None and (rest := self.view.rest()):
            self._take_output(Piece(0, "stdout", rest))
        self._flush()

    def finish(self) -> None:
        """Show the rest, after the end of the run."""
        for reader in self._readers.values():
            for piece in reader.finish():
                self._take(piece)
        self.settle()
        self._close_view()
        for _, source in sorted(self._sources.items()):
            for block in source.lines.finish():
                self._take_block(source, block)
        self._flush()

    def say(self, text: str) -> None:
        """Show a message to the user, on lines of its own."""
        self._write_lines("stderr", encoded(f"{text}\n"))
        self._flush()

    @property
    def is_behind(self) -> bool:
        """Whether the terminal, or the reader in its place, has not accepted all of the output yet."""
        return any(screen.is_behind for screen in self._screens.values())

    def catch_up(self, seconds: float) -> None:
        """Wait up to `seconds` for the reader to accept some output."""
        for screen in self._screens.values():
            screen.flush(seconds)

    def hurry(self) -> None:
        """From now on, as the run is ending, wait only briefly for a slow reader."""
        for screen in self._screens.values():
            screen.patience = FAREWELL_SECONDS

    def _take(self, piece: Piece) -> None:
        if piece.rank is None:
            self._take_launcher(piece)
        elif piece.stream == "news":
            *news, self._news[piece.rank] = (self._news.get(piece.rank, b"") + piece.data).split(
                b"\n"
            )
            for one in news:
                self.on_news(one)
        elif piece.rank == 0 and piece.stream == "stdout" and self.view is not None:
            self._take_output(piece._replace(data=self.view.take(piece.data)))
        else:
            self._take_output(piece)

    def _take_output(self, piece: Piece) -> None:
        """Of a rank."""
        assert piece.rank is not None
        if piece.stream == "stdout" and not self.all_ranks and not self.stamp:
            self._log(piece.rank, "stdout", piece.data)
            if piece.rank == 0:
                self._write("stdout", piece.data)
        else:
            source = self._source(piece.rank, piece.stream)
            for block in source.lines.feed(piece.data):
                self._take_block(source, block)

    def _source(self, rank: int, stream: Stream) -> _Source:
        if (rank, stream) not in self._sources:
            lines = (
                Lines(whole=_MARKER, longest_whole=LONGEST_LINE) if stream == "stderr" else Lines()
            )
            self._sources[rank, stream] = _Source(rank, stream, lines)
        return self._sources[rank, stream]

    def _take_block(self, source: _Source, block: Block) -> None:
        may_tell = source.stream == "stderr" and block.begins and _MARKER in block.data
        # Line by line if one may be a failure, or has been passed on in part.
        apart = may_tell or source.logged
        for data in block.data.splitlines(keepends=True) if apart else [block.data]:
            failure = from_line(data.decode(errors="replace").rstrip("\r\n")) if may_tell else None
            if failure is not None:
                self._take_failure(source.rank, failure)
                continue
            lines = block._replace(data=data)
            self._keep(source, lines)
            self._show(source, lines)
            source.logged = source.shown = 0

    def _take_failure(self, rank: int, failure: Failure) -> None:
        text = encoded(f"{failure.text}\n")
        if self.process_names.is_vital(rank):
            # A rank of an elastic job reports its number at the start. Without tags, only the ranks know their numbers.
            self.failures.append(
                replace(failure, rank=rank) if self.process_names.tagged else failure
            )
        else:
            self._write_lines("stderr", self._labelled(rank, text))
        self._log(rank, "stderr", text)

    def _keep(self, source: _Source, block: Block) -> None:
        """Log the part of the block that is not in the file yet."""
        data = block.data[source.logged :]
        if block.begins and not source.logged:
            source.stamp = self.stamp() if self.stamp else b""
            data = _prefixed(source.stamp, data)
        self._log(source.rank, source.stream, data)

    def _show(self, source: _Source, block: Block) -> None:
        """Show the part of the block that is not on the screen yet, unless it is filtered out."""
        data = block.data
        if block.begins:
            data = self._worth_showing(source, block.data)
            # A line that is partly shown is completed, even if it is an echo.
            source.hidden = not data and not source.shown
            data = block.data[source.shown :] if source.shown else data
        if source.hidden:
            return
        stamp = source.stamp if block.begins and not source.shown else b""
        if self.all_ranks or source.rank != 0:
            self._write_lines(source.stream, self._labelled(source.rank, data, stamp))
        else:
            self._write(source.stream, _prefixed(stamp, data))

    def _show_held(self, source: _Source, held: bytes) -> None:
        """Show an unfinished line, but only of rank 0 where its output looks as if it ran alone."""
        begins = source.lines.begins
        if self.all_ranks or source.rank != 0 or (begins and may_be_noise(held)):
            return
        if begins or not source.hidden:
            lead = source.stamp if begins and not source.shown else b""
            self._write(source.stream, lead + held[source.shown :])
            source.shown = len(held)

    def _worth_showing(self, source: _Source, lines: bytes) -> bytes:
        others = source.rank != 0 and not self.all_ranks
        if source.stream == "stdout":
            return b"" if others else lines
        if others and (b"\r" in lines or not lines.endswith(b"\n")):
            # Lines of a progress bar, or never ended.
            each = lines.splitlines(keepends=True)
            lines = b"".join(one for one in each if one.endswith(b"\n") or len(one) >= LONGEST)
        self._looked_at += lines.count(b"\n") + lines.count(b"\r")
        if self._looked_at > LINES_AT_ONCE:
            return lines
        wanted, texts = without_noise(lines)
        if not self.all_ranks:
            wanted = self._echoes.without_echoes(source.rank, wanted, texts)
        return b"".join(wanted)

    def _labelled(self, rank: int, lines: bytes, stamp: bytes = b"") -> bytes:
        """Return the non-empty lines, each with its label, ending with a line end."""
        if b"\r" in lines:
            lines = lines.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = lines.strip(b"\n")
        while b"\n\n" in lines:
            lines = lines.replace(b"\n\n", b"\n")
        label = b"[%s] %s" % (self.process_names.label(rank).encode(), stamp)
        return _prefixed(label, lines + b"\n") if lines else b""

    def _take_launcher(self, piece: Piece) -> None:
        self.launcher_text = (self.launcher_text + piece.data)[-_LAUNCHER_TAIL:]
        self._log(None, piece.stream, piece.data)
        if self.show_launcher:
            self._write("stderr", piece.data)

    def _log(self, rank: int | None, stream: Stream, data: bytes) -> None:
        name = "launcher.log" if rank is None else f"{self.process_names.folder(rank)}/{stream}"
        self._logs.append(name, data)

    def _close_view(self) -> None:
        if self.view is not None:
            self._screens["stdout"].show(self.view.erase())
            self.view = None

    def _flush(self) -> None:
        self._logs.flush()
        if self.view is not None and not self._begun.get("stdout") and not self.is_behind:
            self._screens["stdout"].show(self.view.draw())
        for screen in self._screens.values():
            screen.flush()

    def _write_lines(self, stream: Stream, lines: bytes) -> None:
        """Write whole lines, starting a new line if rank 0 has an unfinished one."""
        apart = lines and self._begun.get(stream) and not lines.startswith(b"\n")
        self._write(stream, b"\n" + lines if apart else lines)

    def _write(self, stream: Stream, data: bytes) -> None:
        if not data:
            return
        if self.view is not None and self._screens[stream] is self._screens["stdout"]:
            self._screens["stdout"].show(self.view.erase())
        self._screens[stream].show(data)
        for name in self._screens if self._one_terminal else (stream,):
            self._begun[name] = not data.endswith((b"\n", b"\r"))

    def _say_logs_lost(self, error: OSError) -> None:
        self.say(
            f"\ncannot save the output in {self.log_dir}: {error.strerror}; the run continues "
            "without it"
        )

    def _lose(self, stream: Stream, error: OSError) -> None:
        """Handle a stream that can no longer be written to."""
        if isinstance(error, BrokenPipeError):
            self.unread = True
        elif stream == "stdout":
            self.say(
                f"\ncannot write standard output: {error.strerror}; the run continues, and its "
                f"output is in {self.log_dir}"
            )


def _prefixed(prefix: bytes, lines: bytes) -> bytes:
    """Return `lines` with `prefix` in front of each line."""
    if not prefix:
        return lines
    # bytes.replace has the lowest cost per line.
    each = lines.replace(b"\n", b"\n" + prefix)
    if b"\r" in lines:
        each = each.replace(b"\r", b"\r" + prefix).replace(b"\r%s\n" % prefix, b"\r\n")
    ended = lines.endswith((b"\n", b"\r"))
    return prefix + (each[: -len(prefix)] if ended else each)


def _may_be_failure(source: _Source, line: bytes) -> bool:
    """Return whether the line is a failure report, or the beginning of one."""
    return source.stream == "stderr" and _MARKER.startswith(line[: len(_MARKER)])
