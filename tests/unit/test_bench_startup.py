"""Timing the start of a launch."""

import itertools
import os
import sys
from types import SimpleNamespace

import pytest

from hvdtrain.bench.startup import LINE, seconds_to_line
from hvdtrain.errors import EngineError


def test_the_first_line_counts_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: a busy machine may halt for longer than the command takes."""
    clock = itertools.count(3.0, 2.0)
    own = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("hvdtrain.bench.startup.time", own)
    code = f"for line in ('other', '{LINE}', '{LINE}', 'end'): print('[0]<stdout>:' + line)"
    assert seconds_to_line([sys.executable, "-c", code], os.environ) == 2.0


@pytest.mark.parametrize("code", ["print('other')", f"print({LINE!r}); raise SystemExit(3)"])
def test_a_launch_that_fails(code: str) -> None:
    with pytest.raises(EngineError, match="the launch failed"):
        seconds_to_line([sys.executable, "-c", code], os.environ)
