"""A fit that goes on as it was arranged equals the undisturbed one to the bit, whatever it is made of."""

from __future__ import annotations

import pytest
from launch import on_ranks


@pytest.mark.slow
def test_each_pair() -> None:
    for found in on_ranks("resumed_pairs", np=2, timeout=1800).of("case_rows"):
        assert found
        assert {name: far for name, far in found.items() if far} == {}
