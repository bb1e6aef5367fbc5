"""What the library says to its user, through the logger "hvdtrain".

Until a program sets up logging, messages stand on the terminal alone, without a level or a time: information on
standard output, as Keras has it, the rest on standard error. Once the logger or one above it has a handler of the
program's, messages go there and nowhere else. Warnings about the user's code are no messages: they are Python
warnings, which point at a line (`hvdtrain.errors.warn_user`); `logging.captureWarnings` brings them here as well.
"""

from __future__ import annotations

import logging
import sys

NAME = "hvdtrain"


def logger() -> logging.Logger:
    """The logger "hvdtrain", ready to be used. It passes on INFO unless the program has set another level."""
    found = logging.getLogger(NAME)
    if not any(isinstance(handler, _Terminal) for handler in found.handlers):
        found.addHandler(_Terminal())
        if found.level == logging.NOTSET:
            found.setLevel(logging.INFO)
    return found


class _Terminal(logging.Handler):
    """Prints what no handler of the program's takes. The streams are those of the moment: they may be redirected."""

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
