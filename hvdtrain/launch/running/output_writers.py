"""Where a run's output goes: the log folder's files and the user's two streams.

A disk that is full or a terminal that has gone is no reason to end a training that is well: a place
that cannot be written to any more is left out from then on.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import resource
import select
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

FAREWELL_SECONDS = 1.0
"""For a reader that takes nothing, once the run is to end."""

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write every byte; a file without a buffer may take fewer at a time. Raises OSError."""
    while data:
        written: int | None = file.write(data)
        if written is None:  # Somebody set the terminal to not waiting.
            select.select([], [file], [])
        data = data[written or 0 :]


def bytes_of(stream: TextIO) -> BinaryIO:
    """What takes the bytes of a stream; a notebook's cell is no file, and gets them as text.

    Of a file it is no buffer: that would be written again at the end, to where it cannot be.
    """
    if isinstance(stream, io.TextIOWrapper):
        return open(stream.fileno(), "wb", buffering=0, closefd=False)
    return cast(BinaryIO, _AsText(stream))


class _AsText(io.RawIOBase):
    """Writes bytes to a stream of text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: Buffer, /) -> int:
        content = bytes(data)
        self._stream.write(self._decoder.decode(content))
        self._stream.flush()
        return len(content)


@dataclass
class LogFiles:
    """Files below `folder`, opened when something is written to them. Close it at the end.

    Attributes:
        on_loss: told once, about the first file that cannot be written.
    """

    folder: Path
    on_loss: Callable[[OSError], None]
    _files: dict[str, BinaryIO | None] = field(default_factory=dict)
    _waiting: dict[str, list[bytes]] = field(default_factory=dict)
    _lost: bool = False
    _most_files: tuple[int, int] | None = None

    def append(self, name: str, data: bytes) -> None:
        """Append to the file `name`, at the next `flush`."""
        self._waiting.setdefault(name, []).append(data)

    def flush(self) -> None:
        """Write what was appended. A file is given up at its first error."""
        waiting, self._waiting = self._waiting, {}
        for name, parts in waiting.items():
            try:
                if name not in self._files:
                    self._files[name] = self._open(self.folder / name)
                file = self._files[name]
                if file is not None:
                    write_all(file, b"".join(parts))
            except OSError as error:
                self._lose(name, error)

    def close(self) -> None:
        self.flush()
        for name, file in self._files.items():
            try:
                if file is not None:
                    file.close()
            except OSError as error:
                self._lose(name, error)
        self._files.clear()
        if self._most_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._most_files)
            self._most_files = None

    def _open(self, path: Path) -> BinaryIO:
        if self._most_files is None:
            # Two files a rank. What has been started before keeps its own limit: some programs
            # close as many files as there may be.
            self._most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (self._most_files[1],) * 2)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Unbuffered: what was said is in the file even if this process is killed.
        return open(path, "ab", buffering=0, opener=_open_private)

    def _lose(self, name: str, error: OSError) -> None:
        self._files[name] = None
        if not self._lost:
            self._lost = True
            self.on_loss(error)


def _open_private(path: str, flags: int) -> int:
    """What a job prints is for its user only."""
    return os.open(path, flags, 0o600)


@dataclass
class Screen:
    """One of the streams that the user looks at. What its reader does not take yet is kept: writing never waits.

    Attributes:
        on_loss: told once, when it cannot be written to any more.
        patience: seconds after which a reader that takes nothing is shown no more.
    """

    target: BinaryIO
    on_loss: Callable[[OSError], None]
    patience: float = float("inf")
    _lost: bool = False
    _waiting: bytearray = field(default_factory=bytearray)
    _took_at: float = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether its reader has not taken all yet."""
        return bool(self._waiting)

    def show(self, data: bytes) -> None:
        """Show it, at the next `flush`."""
        if not self._lost:
            self._took_at = self._took_at if self._waiting else time.monotonic()
            self._waiting += data

    def flush(self, seconds: float = 0.0) -> None:
        """Write what its reader takes, waiting up to `seconds` for it to take any."""
        try:
            while self._waiting and (count := self._write(seconds)):
                del self._waiting[:count]
                self._took_at, seconds = time.monotonic(), 0.0
        except OSError as error:
            self._leave()
            self.on_loss(error)
        if self._waiting and time.monotonic() - self._took_at > self.patience:
            self._leave()

    def _write(self, seconds: float) -> int:
        """Returns how many bytes the reader has taken; 0 if it takes none now."""
        most = _most_at_once(self.target)
        if most is not None and not select.select([], [self.target], [], seconds)[1]:
            return 0
        with memoryview(self._waiting)[:most] as data:
            return self.target.write(data) or 0

    def _leave(self) -> None:
        self._lost = True
        self._waiting.clear()


def _most_at_once(target: BinaryIO) -> int | None:
    """How many bytes a pipe or a terminal takes without waiting, once it takes any; None: a file takes all."""
    try:
        mode = os.fstat(target.fileno()).st_mode
    except io.UnsupportedOperation:  # A notebook's cell.
        return None
    return None if stat.S_ISREG(mode) else select.PIPE_BUF
