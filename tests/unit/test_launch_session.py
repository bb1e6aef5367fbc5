"""A launch from its command to the exit code: what a rank that fails means for the others."""

import sys
from pathlib import Path

import pytest

from hvdtrain.launch.running.session import View, run_launch
from hvdtrain.worker.failure import Failure

# Rank 1 fails, and the others come to a good end later than a job that has to end is given.
OTHERS_GO_ON = """
import sys, time
print("[1]<stderr>:" + sys.argv[1], file=sys.stderr, flush=True)
time.sleep(4)
print("[0]<stdout>:done", flush=True)
"""


@pytest.mark.parametrize(
    ("elastic", "exit_code", "shown"), [(True, 0, "done\n"), (False, 7, "")], ids=["elastic", "not"]
)
def test_the_others_go_on_if_elastic(
    elastic: bool, exit_code: int, shown: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture
) -> None:
    line = Failure(rank=1, exit_code=7, secondary=False, text="no disk").to_line()
    command = [sys.executable, "-c", OTHERS_GO_ON, line]
    assert run_launch(command, View(tmp_path / "logs"), elastic=elastic) == exit_code
    out, err = capfdbinary.readouterr()
    assert out.decode() == shown
    assert ("rank 1 failed: no disk" in err.decode()) == (not elastic)
