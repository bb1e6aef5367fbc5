"""Timing the start of a launch."""

import os
import sys

import pytest

from hvdtrain.bench.startup import LINE, seconds_to_line
from hvdtrain.errors import EngineError


def test_the_first_line_counts_not_the_end() -> None:
    code = f"import time; time.sleep(0.2); print('[0]<stdout>:{LINE}', flush=True); time.sleep(1)"
    assert 0.2 < seconds_to_line([sys.executable, "-c", code], os.environ) < 1.0


@pytest.mark.parametrize("code", ["print('other')", f"print({LINE!r}); raise SystemExit(3)"])
def test_a_launch_that_fails(code: str) -> None:
    with pytest.raises(EngineError, match="the launch failed"):
        seconds_to_line([sys.executable, "-c", code], os.environ)
