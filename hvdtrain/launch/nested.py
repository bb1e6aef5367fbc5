"""A launch starts all of its processes: it is not for each process of another one to start it."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.errors import UsageError
from hvdtrain.rank_variables import size_variable


def check_started_once(environ: Mapping[str, str]) -> None:
    """Raises UsageError in one of several processes of another launch."""
    name = size_variable(environ)
    if name:
        size = environ[name]
        raise UsageError(
            f"this is one of {size} processes of another launch ({name}={size}): start hvdtrain run "
            "once, without mpirun or horovodrun and not from a worker; it starts the workers itself"
        )
