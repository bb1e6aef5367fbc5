"""The exceptions of hvdtrain. Every message says what was wrong, where, and what to do.

`hvdtrain.worker` prints a `HvdtrainError` as one message without a traceback and exits with its
`exit_code`; any other exception is a bug in the user's script or in hvdtrain and keeps its traceback.
"""


class HvdtrainError(Exception):
    """Something went wrong at run time. Base of all errors that hvdtrain raises on purpose."""

    exit_code = 1


class UsageError(HvdtrainError, ValueError):
    """The caller gave an argument, an option or data that cannot work."""

    exit_code = 2


class ReplicaError(HvdtrainError):
    """Ranks that must hold, or be about to do, the same thing do not."""


class EngineError(HvdtrainError):
    """Horovod is missing or does not load; a collective stopped, or the rank for which this one waits failed."""
