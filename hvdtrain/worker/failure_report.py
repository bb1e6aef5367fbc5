"""The report of a failed rank to the launcher: one line of JSON on the rank's standard error.

A single line survives every transport between the two (pipes, mpirun, ssh), while the lines of a traceback would be
mixed with those of other ranks.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

MARKER = "@hvdtrain-failure "
LONGEST_TEXT = 100_000
"""Characters; of a longer text only the end is sent."""
LONGEST_LINE = 13 * LONGEST_TEXT
"""Bytes: JSON takes up to twelve per character."""

# Errors that a rank gets when another one has gone, by class name (so that nothing need be imported) and by message.
SECONDARY_CLASSES = {"HorovodInternalError", "EngineError", "CancelledError", "AbortedError"}
SECONDARY_MESSAGES = (
    "Horovod has been shut down",
    "Horovod has not been initialized",  # Its background thread has ended.
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
)


@dataclass(frozen=True)
class Failure:
    """The reason why a rank ended.

    Attributes:
        rank: Rank that failed.
        exit_code: Exit code of the rank, 1-255.
        secondary: Whether the error only reports that another rank has gone.
        text: Traceback or message; empty for a bare `sys.exit(n)`.
        size: Number of ranks.
    """

    rank: int
    exit_code: int
    secondary: bool
    text: str
    size: int = field(default=1, compare=False)

    def to_line(self) -> str:
        """Return the report as one line, without a newline."""
        fields = asdict(self)
        if len(self.text) > LONGEST_TEXT:
            fields["text"] = f"[...]\n{self.text[-LONGEST_TEXT:]}"
        # '<' is escaped, so that no text looks like the launcher's own `[0]<stderr>:` tags.
        return MARKER + json.dumps(fields).replace("<", "\\u003c")


def from_line(line: str) -> Failure | None:
    """Parse a line from `Failure.to_line`; return None for any other text."""
    if not line.startswith(MARKER):
        return None
    try:
        failure = Failure(**json.loads(line.removeprefix(MARKER)))
    except (ValueError, TypeError, RecursionError):
        return None
    types = (
        (failure.rank, int),
        (failure.exit_code, int),
        (failure.secondary, bool),
        (failure.text, str),
        (failure.size, int),
    )
    return failure if all(isinstance(value, kind) for value, kind in types) else None


def text_of(error: object) -> str:
    """Return `str(error)`, even if the class's `__str__` raises an error."""
    try:
        return str(error)
    except BaseException:
        return f"<{type(error).__name__}; its __str__ raised an error>"


def encoded(text: str) -> bytes:
    """Encode text; file names that are not UTF-8 get their original bytes back."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace")


def is_secondary(error: BaseException) -> bool:
    """Return whether `error`, or an error that led to it, only reports that another rank has gone."""
    return any(
        any(cls.__name__ in SECONDARY_CLASSES for cls in type(link).__mro__)
        or any(message in text_of(link) for message in SECONDARY_MESSAGES)
        for link in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
