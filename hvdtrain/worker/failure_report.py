"""How a rank reports to the launcher why it failed: one line of JSON on its standard error.

A line survives every transport between the two (pipes, mpirun, ssh); a traceback of many lines is
torn apart between those of other ranks.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

MARKER = "@hvdtrain-failure "
LONGEST_TEXT = 100_000
"""Characters; only the end of a longer text is sent."""
LONGEST_LINE = 13 * LONGEST_TEXT
"""Bytes: JSON takes up to twelve for a character."""

# What a rank sees when another one has gone, by class name (nothing is imported to ask) and by
# message.
SECONDARY_CLASSES = {"HorovodInternalError", "EngineError", "CancelledError", "AbortedError"}
SECONDARY_MESSAGES = (
    "Horovod has been shut down",
    "Horovod has not been initialized",  # Its thread has ended.
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
)


@dataclass(frozen=True)
class Failure:
    """Why one rank ended.

    Attributes:
        rank: the rank that failed.
        exit_code: what it exits with, 1-255.
        secondary: whether the error only reports that another rank is gone.
        text: the traceback or message; empty for a bare `sys.exit(n)`.
    """

    rank: int
    exit_code: int
    secondary: bool
    text: str

    def to_line(self) -> str:
        fields = asdict(self)
        if len(self.text) > LONGEST_TEXT:
            fields["text"] = f"[...]\n{self.text[-LONGEST_TEXT:]}"
        # '<' is escaped so that no text can look like the launcher's own `[0]<stderr>:` tags.
        return MARKER + json.dumps(fields).replace("<", "\\u003c")


def from_line(line: str) -> Failure | None:
    """The failure that `line` carries; None if it is any other text."""
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
    )
    return failure if all(isinstance(value, kind) for value, kind in types) else None


def text_of(error: object) -> str:
    """`str(error)`, even if the class's own `__str__` fails."""
    try:
        return str(error)
    except BaseException:
        return f"<{type(error).__name__}; its __str__ raised an error>"


def encoded(text: str) -> bytes:
    """Text as bytes. File names that are not UTF-8 become their original bytes."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace")


def is_secondary(error: BaseException) -> bool:
    """Whether `error`, or an error that led to it, only reports that another rank is gone."""
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
