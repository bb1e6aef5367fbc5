"""A launch starts all of its processes: it is not for each process of another one to start it."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.errors import UsageError

# By whom a process was started, each of so many: horovodrun (or hvdtrain run), mpirun.
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")


def check_started_once(environ: Mapping[str, str]) -> None:
    """Raises UsageError in one of several processes of another launch."""
    for name in _SIZES:
        size = environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise UsageError(
                f"this is one of {size} processes of another launch ({name}={size}): start hvdtrain run "
                "once, without mpirun or horovodrun and not from a worker; it starts the workers itself"
            )
