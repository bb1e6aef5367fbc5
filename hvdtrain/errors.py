"""Exceptions and warnings of hvdtrain. Every message says what was wrong, where, and what to do.

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
    """Base class of all errors that hvdtrain raises on purpose; raised itself for run-time errors.

    Attributes:
        exit_code: Exit code of a program that ends with this error.
    """

    exit_code = 1


class Preempted(HvdtrainError):
    """The job was asked to stop, and the training has saved a checkpoint. Run it again to continue."""

    exit_code = EXIT_PREEMPTED


class LaunchError(HvdtrainError):
    """A rank of `hvdtrain.launch` failed. `str()` of the error is its `message`.

    Attributes:
        rank: Rank that failed first; None if unknown.
        exit_code: Exit code of the run; 0 if a rank ended without a result that can be unpickled.
        traceback: Traceback of that rank, as text; empty if it sent none.
        log_dir: Folder with the output of all ranks.
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
    """An argument, an option or the data is invalid."""

    exit_code = 2


class ReplicaError(HvdtrainError):
    """The ranks differ in weights, data or arguments that must be the same, or in the next collective."""


class DivergedError(HvdtrainError):
    """The loss or a weight became nan or inf, and the training was stopped because of Trainer(on_nan=...)."""


class EngineError(HvdtrainError):
    """Horovod cannot be loaded, a collective failed, or a rank that this one waited for has failed."""


def exit_code_of(program: Callable[[], int]) -> int:
    """Run one of hvdtrain's own programs, and print an `HvdtrainError` as a message on standard error.

    Args:
        program: Function without arguments that returns an exit code.

    Returns:
        The exit code of the program, of the error, or of Ctrl-C (130).
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
    """Return `value` as a Python integer. NumPy integers are accepted, bools are not.

    Args:
        name: Name of the argument, for the message.
        value: Value that the user passed.
        least: Smallest allowed value.

    Raises:
        UsageError: `value` is not an integer, or is less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"{name}={value!r}: pass an integer, {least} or more")
    return int(value)


def warn_user(text: str) -> None:
    """Issue a UserWarning with the message `text` at the innermost line of the call stack that is the user's own code.

    Python shows that line with the warning; a line of hvdtrain's would not help the user.
    """
    caller = sys._getframe(1)
    frame: FrameType | None = caller
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame = frame.f_back
    frame = frame or caller  # A library's thread has no line of the user's.
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry
    )


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return " Did you mean 'X'?" for the end of a message; empty if nothing in `known` is similar to `name`."""
    from difflib import get_close_matches

    close = get_close_matches(str(name), list(known))
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
