"""The exceptions and warnings of hvdtrain. Every message states what was wrong, where, and what to do.

`hvdtrain.worker` prints an `HvdtrainError` as one message without a traceback and exits with its `exit_code`. Any
other exception is a bug in the user's script or in hvdtrain, and keeps its traceback.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from numbers import Integral
from pathlib import Path
from types import FrameType

from hvdtrain.environment import EXIT_INTERRUPTED, EXIT_PREEMPTED
from hvdtrain.signals import interruptible

_LIBRARIES = ("hvdtrain", "keras", "tensorflow", "horovod", "contextlib", "functools", "threading")


class HvdtrainError(Exception):
    """Base class of all errors that hvdtrain raises on purpose; by itself, a run-time error."""

    exit_code = 1


class Preempted(HvdtrainError):
    """The job was asked to stop, and the training has saved. Run it again to continue."""

    exit_code = EXIT_PREEMPTED


class LaunchError(HvdtrainError):
    """A rank of `hvdtrain.launch` failed. `str()` of the error returns its `message`.

    Attributes:
        rank: the rank that failed first; None if unknown.
        exit_code: exit code of the run; 0 if a rank ended without a result.
        traceback: traceback of that rank, as text; empty if it sent none.
        log_dir: folder with the output of all ranks.
    """

    def __init__(
        self, message: str, rank: int | None, exit_code: int, traceback: str, log_dir: Path
    ) -> None:
        super().__init__(message, rank, exit_code, traceback, log_dir)
        self.rank = rank
        self.exit_code = exit_code
        self.traceback = traceback
        self.log_dir = log_dir

    def __str__(self) -> str:
        return str(self.args[0])


class UsageError(HvdtrainError, ValueError):
    """An argument, an option or data cannot work."""

    exit_code = 2


class ReplicaError(HvdtrainError):
    """Ranks disagree on what must be the same: weights, data, arguments, or the next collective."""


class DivergedError(HvdtrainError):
    """The loss or a weight became nan or inf, and the training ended as Trainer(on_nan=...) asks."""


class EngineError(HvdtrainError):
    """Horovod is missing or does not load, a collective failed, or a rank that this one waits for has failed."""


def exit_code_of(program: Callable[[], int]) -> int:
    """Run a program of hvdtrain's own; an error that it raises on purpose becomes one message on standard error.

    Args:
        program: returns an exit code.

    Returns:
        That exit code, the error's, or that of Ctrl-C.
    """
    try:
        with interruptible():
            return program()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except HvdtrainError as error:
        for line in str(error).splitlines():
            print(f"hvdtrain: {line}", file=sys.stderr)
        return error.exit_code


def require_integer(name: str, value: object, least: int = 1) -> int:
    """Return `value` as a Python integer; NumPy's are integers too, bools are not.

    Args:
        name: of the argument, for the message.
        value: what the user passed.
        least: the smallest that is allowed.

    Raises:
        UsageError: it is no integer, or below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"{name}={value!r}: pass an integer, {least} or more")
    return int(value)


def warn_user(text: str) -> None:
    """Issue a UserWarning at the line of the user's that led here: the last one that is not a library's.

    Python shows that line with the warning. One of hvdtrain's own would tell nothing.

    Args:
        text: the warning.
    """
    caller = sys._getframe(1)
    frame: FrameType | None = caller
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame = frame.f_back
    frame = frame or caller  # In a thread of a library's there is no such line.
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry
    )


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """ " Did you mean 'X'?", for the end of a message; empty if nothing in `known` is like `name`."""
    from difflib import get_close_matches

    close = get_close_matches(str(name), list(known))
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
