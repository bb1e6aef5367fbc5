"""Requests of a worker to the launcher of its elastic job: for its rank, of saved states, for changes of hosts."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress

from hvdtrain.errors import EngineError
from hvdtrain.rank_variables import RENDEZVOUS_ADDRESS, is_elastic
from hvdtrain.worker.heartbeat import in_phase

RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
HOROVODS_PLACE = "rank_and_size"
"""Horovod's own request, answered when all other workers have asked or have gone."""
NEXT_PLACE, ARRIVAL, SAVED = "hvdtrain_next_place", "hvdtrain_arrival", "hvdtrain_saved"
CHANGES = "hvdtrain_changes"
ON_DISK, IN_MEMORY = "disk", "memory"
SAVED_SECONDS = 1.0
"""Shortest interval between two reported commits."""
TELL_SECONDS = 5.0
_PLACE = tuple(
    f"HOROVOD_{of}{what}" for of in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")
)


def place_in_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Wait until all remaining workers are known; return the variables with this worker's new rank and size.

    Horovod asks for them itself when it starts again in the same process; a new process must know them beforehand.

    Raises:
        EngineError: The launcher cannot be reached.
        SystemExit: The job continues without this worker.
    """
    # Horovod's own launcher knows only its own request.
    return _place(environ, NEXT_PLACE) or _place(environ, HOROVODS_PLACE)


def place_after_arrival(environ: Mapping[str, str]) -> dict[str, str]:
    """Wait until all workers are about to start Horovod; return the variables with this worker's rank and size.

    They may differ from the previous ones, and are empty under a launcher that does not support this. Horovod itself
    waits only until Gloo's time-out, and aborts the process if another worker fails meanwhile.

    Raises:
        EngineError: The launcher cannot be reached.
        SystemExit: The job continues without this worker.
    """
    return _place(environ, ARRIVAL)


def tell_saved(where: str) -> None:
    """Tell the launcher, if the job is elastic, that training can continue from a new state, ON_DISK or IN_MEMORY."""
    _tell(SAVED, where)


def ask_for_changes() -> None:
    """Have the launcher, if the job is elastic, notify rank 0 if the hosts are no longer those of this round."""
    _tell(CHANGES, "hosts")


def has_saved(environ: Mapping[str, str]) -> bool:
    """Whether this elastic job has saved a checkpoint on disk; False if its launcher is Horovod's own, or has gone."""
    try:
        return _ask(environ, SAVED, ON_DISK) == ON_DISK
    except OSError:
        return False


class Commits:
    """Reports commits to the launcher, at most one per SAVED_SECONDS."""

    def __init__(self) -> None:
        self._told = float("-inf")

    def note(self) -> None:
        """Report a commit, unless another one was reported shortly before."""
        if time.monotonic() - self._told >= SAVED_SECONDS:
            tell_saved(IN_MEMORY)
            self._told = time.monotonic()


def _place(environ: Mapping[str, str], scope: str) -> dict[str, str]:
    slot = f"{environ['HOROVOD_HOSTNAME']}:{environ['HOROVOD_LOCAL_RANK']}"
    with in_phase("init", waiting=True):
        try:
            numbers = _ask(environ, scope, slot).split(",")
        except urllib.error.HTTPError:
            return {}
        except OSError as error:
            raise EngineError(
                f"the launcher of this elastic job cannot be reached: {error}"
            ) from error
    if int(numbers[0]) < 0:
        raise SystemExit(0)
    return dict(zip(_PLACE, numbers, strict=True))


def _tell(scope: str, key: str) -> None:
    if is_elastic(os.environ):
        with suppress(OSError):  # The launcher may be Horovod's own, or gone.
            _ask(os.environ, scope, key, method="PUT", timeout=TELL_SECONDS)


def _ask(
    environ: Mapping[str, str],
    scope: str,
    key: str,
    method: str = "GET",
    timeout: float | None = None,
) -> str:
    url = f"http://{environ[RENDEZVOUS_ADDRESS]}:{environ[RENDEZVOUS_PORT]}/{scope}/{key}"
    body = b"" if method == "PUT" else None
    request = urllib.request.Request(url, body, method=method)
    # Without a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout) as answer:
        told: str = answer.read().decode()
    return told
