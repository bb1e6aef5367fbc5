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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

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
    """One of the streams that the user looks at.

    Attributes:
        on_loss: told once, when it cannot be written to any more.
    """

    target: BinaryIO
    on_loss: Callable[[OSError], None]
    _lost: bool = False
    _waiting: list[bytes] = field(default_factory=list)

    def show(self, data: bytes) -> None:
        """Show it, at the next `flush`."""
        self._waiting.append(data)

    def flush(self) -> None:
        data = b"".join(self._waiting)
        self._waiting.clear()
        if self._lost or not data:
            return
        try:
            write_all(self.target, data)
            self.target.flush()
        except OSError as error:
            self._lost = True
            self.on_loss(error)

    def leave(self) -> None:
        """Show no more: its reader has halted it, and the user does not want to wait."""
        self._lost = True
