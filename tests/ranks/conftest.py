"""The session's ranks end with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from launch import pools


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files of slow tests first: one that began last would run alone, for minutes."""
    tests = Counter(item.path for item in items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path] / tests[item.path], -tests[item.path]))


@pytest.fixture(scope="session", autouse=True)
def end_ranks() -> Iterator[None]:
    yield
    pools().close()
