"""Write a run's output to the files of the log folder and to the user's two streams.

A full disk or a closed terminal is no reason to end a healthy run: a destination that can no longer be
written to is skipped from then on.
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

from hvdtrain.standard_streams import write_all

FAREWELL_SECONDS = 1.0
"""Time limit for a stalled reader once the run is ending."""

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


def bytes_of(stream: TextIO | None) -> BinaryIO:
    """Return a binary writer for a stream. One that is not a file, as a notebook's, gets the bytes as text.

    For a file, the writer is not the stream's buffer: after a failed write, Python would flush that again at exit.

    Args:
        stream: Standard output or error: None in a process that was started without, and any object with `write` if a
            script has replaced it.
    """
    if stream is None or getattr(stream, "closed", False):
        return Path(os.devnull).open("wb", buffering=0)
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(io.UnsupportedOperation):  # In memory, as in tests.
            return open(stream.fileno(), "wb", buffering=0, closefd=False)
    return cast(BinaryIO, _AsText(stream))


class _AsText(io.RawIOBase):
    """Writes bytes to a text stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: Buffer, /) -> int:
        content = bytes(data)
        self._stream.write(self._decoder.decode(content))
        if flush := getattr(self._stream, "flush", None):
            flush()
        return len(content)


@dataclass
class LogFiles:
    """Files below a folder, opened on first write. Call `close` at the end.

    Attributes:
        folder: Log folder.
        on_loss: Function called once, with the error of the first file that cannot be written.
    """

    folder: Path
    on_loss: Callable[[OSError], None]
    _files: dict[str, BinaryIO | None] = field(default_factory=dict)
    _waiting: dict[str, list[bytes]] = field(default_factory=dict)
    _lost: bool = False
    _most_files: tuple[int, int] | None = None

    def append(self, name: str, data: bytes) -> None:
        """Queue `data` for the file `name`, to be written by the next `flush`."""
        self._waiting.setdefault(name, []).append(data)

    def flush(self) -> None:
        """Write the queued data. A file is abandoned at its first error."""
        waiting, self._waiting = self._waiting, {}
        for name, parts in waiting.items():
            try:
                if name not in self._files:
                    self._files[name] = self._open(self.folder / name)
                file = self._files[name]
                if file is not None:
                    write_all(file.fileno(), b"".join(parts))
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
            # Each rank needs two files. Programs started earlier keep the old limit: some close as many
            # descriptors as the limit allows.
            self._most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (self._most_files[1],) * 2)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Unbuffered, so that output is in the file even if this process is killed.
        return open(path, "ab", buffering=0, opener=_open_private)

    def _lose(self, name: str, error: OSError) -> None:
        self._files[name] = None
        if not self._lost:
            self._lost = True
            self.on_loss(error)


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner can read."""
    return os.open(path, flags, 0o600)


@dataclass
class Screen:
    """One of the streams that the user sees. Writing never blocks: data that the reader does not accept yet is kept.

    Attributes:
        target: The stream.
        on_loss: Function called once, when the stream can no longer be written to.
        patience: Seconds after which a reader that accepts nothing is abandoned.
    """

    target: BinaryIO
    on_loss: Callable[[OSError], None]
    patience: float = float("inf")
    _lost: bool = False
    _waiting: bytearray = field(default_factory=bytearray)
    _took_at: float = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether data is waiting for the reader."""
        return bool(self._waiting)

    def show(self, data: bytes) -> None:
        """Queue `data`, to be written by the next `flush`."""
        if not self._lost:
            self._took_at = self._took_at if self._waiting else time.monotonic()
            self._waiting += data

    def flush(self, seconds: float = 0.0) -> None:
        """Write what the reader accepts, waiting up to `seconds` until it accepts any."""
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
        """Return how many bytes the reader accepted; 0 if it accepts none now."""
        most = _most_at_once(self.target)
        if most is not None and not select.select([], [self.target], [], seconds)[1]:
            return 0
        with memoryview(self._waiting)[:most] as data:
            return self.target.write(data) or 0

    def _leave(self) -> None:
        self._lost = True
        self._waiting.clear()


def _most_at_once(target: BinaryIO) -> int | None:
    """Return how many bytes a writable pipe or terminal accepts without blocking. None: no limit, as for a file."""
    try:
        mode = os.fstat(target.fileno()).st_mode
    except io.UnsupportedOperation:  # A notebook's output.
        return None
    return None if stat.S_ISREG(mode) else select.PIPE_BUF
