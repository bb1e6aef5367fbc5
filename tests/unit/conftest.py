"""Unit tests share one process: what one file makes of it, the next file must not see."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def own_environment() -> Iterator[None]:
    """A rank's start sets variables (`hvdtrain.init`); they end with the file."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
