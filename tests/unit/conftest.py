"""Unit tests share one process: what one file makes of it, the next file must not see."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def own_environment() -> Iterator[None]:
    """A rank's start sets variables (`hvdtrain.init`); they end with the file."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def hangups_count() -> Iterator[None]:
    """Whoever started the tests may have told them to ignore SIGHUP, as nohup does; commands would heed that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
