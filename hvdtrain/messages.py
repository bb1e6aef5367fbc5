"""The logger "hvdtrain", through which the library sends messages to its user.

Until a program configures logging, messages are printed as plain text: information on standard output, as in Keras,
the rest on standard error. Once the logger or one of its ancestors has another handler, messages go only there.
Warnings about the user's code are Python warnings, which point at a line (`hvdtrain.errors.warn_user`);
`logging.captureWarnings` passes them on to logging as well.
"""

from __future__ import annotations

import logging
import sys

NAME = "hvdtrain"


def logger() -> logging.Logger:
    """Return the logger "hvdtrain", with level INFO unless the program has set another level."""
    found = logging.getLogger(NAME)
    if not any(isinstance(handler, _Terminal) for handler in found.handlers):
        found.addHandler(_Terminal())
        if found.level == logging.NOTSET:
            found.setLevel(logging.INFO)
    return found


class _Terminal(logging.Handler):
    """Prints records while the program has no handler for them; looks up the streams each time, as they may change."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _has_other_handlers(logging.getLogger(NAME)):
            stream = sys.stdout if record.levelno < logging.WARNING else sys.stderr
            print(self.format(record), file=stream, flush=True)


def _has_other_handlers(found: logging.Logger | None) -> bool:
    while found is not None:
        if any(not isinstance(handler, _Terminal) for handler in found.handlers):
            return True
        found = found.parent if found.propagate else None
    return False
