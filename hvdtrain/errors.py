"""The exceptions of hvdtrain. Every message says what was wrong, where, and what to do.

`hvdtrain.worker` prints a `HvdtrainError` as one message without a traceback and exits with its
`exit_code`; any other exception is a bug in the user's script or in hvdtrain and keeps its traceback.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from hvdtrain.environment import EXIT_PREEMPTED


class HvdtrainError(Exception):
    """Something went wrong at run time. Base of all errors that hvdtrain raises on purpose."""

    exit_code = 1


class Preempted(HvdtrainError):
    """The job was told to end. The training has saved and stopped; it goes on when it is run again."""

    exit_code = EXIT_PREEMPTED


class LaunchError(HvdtrainError):
    """`hvdtrain.launch` has failed: the first failure of its ranks.

    `message` is what `str` of it returns.

    Attributes:
        rank: that failed first; None if it is not known.
        exit_code: of the run; 0 for a rank that ended without a result.
        traceback: on that rank, as text; empty if it told none.
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
    """The caller gave an argument, an option or data that cannot work."""

    exit_code = 2


class ReplicaError(HvdtrainError):
    """Ranks that must hold, or be about to do, the same thing do not."""


class DivergedError(HvdtrainError):
    """The loss or a weight has become nan or inf, and Trainer(on_nan="stop") has stopped the training."""


class EngineError(HvdtrainError):
    """Horovod is missing or does not load; a collective stopped, or the rank for which this one waits failed."""


def exit_code_of(program: Callable[[], int]) -> int:
    """Run a program of hvdtrain's own; an error that it raises on purpose becomes one message on standard error.

    Args:
        program: returns an exit code.

    Returns:
        That exit code, or the error's.
    """
    try:
        return program()
    except HvdtrainError as error:
        for line in str(error).splitlines():
            print(f"hvdtrain: {line}", file=sys.stderr)
        return error.exit_code


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """ " Did you mean 'X'?", for the end of a message; empty if nothing in `known` is like `name`."""
    from difflib import get_close_matches

    close = get_close_matches(str(name), list(known))
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
