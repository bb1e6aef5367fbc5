"""The session's ranks end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launch import pools


@pytest.fixture(scope="session", autouse=True)
def end_ranks() -> Iterator[None]:
    yield
    pools().close()
