"""What all tests have in common."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# On a busy machine any example may take long once, which says nothing about the code.
settings.register_profile("unhurried", parent=settings(), deadline=None)
settings.load_profile("unhurried")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `all_cases` unless HVDTRAIN_ALL_CASES is set."""
    if "HVDTRAIN_ALL_CASES" in os.environ:
        return
    left_out = [item for item in items if item.get_closest_marker("all_cases")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
