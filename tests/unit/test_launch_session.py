"""A launch from its command to the exit code: what a rank that fails means for the others."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdtrain.launch.running import session
from hvdtrain.launch.running.run_status import RunStatus
from hvdtrain.launch.running.session import OutputOptions, RunLimits, run_launch
from hvdtrain.worker.failure_report import Failure

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
    assert (
        run_launch(command, OutputOptions(tmp_path / "logs"), RunLimits(), elastic=elastic)
        == exit_code
    )
    out, err = capfdbinary.readouterr()
    assert out.decode() == shown
    assert ("rank 1 failed: no disk" in err.decode()) == (not elastic)


def test_a_run_without_any_news_tells_that_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no lock tells, a run whose status is old counts as ended."""
    monkeypatch.setattr(session, "WRITE_SECONDS", 0.2)
    written: list[Path] = []
    monkeypatch.setattr(RunStatus, "write", lambda _, folder: written.append(folder))
    command = [sys.executable, "-c", "import time; time.sleep(2)"]
    assert run_launch(command, OutputOptions(tmp_path / "logs"), RunLimits()) == 0
    assert len(written) >= 4


REPOSITORY = Path(__file__).parents[2]
LAUNCH = """
import sys
from pathlib import Path
from hvdtrain.launch.running.process_names import ALONE
from hvdtrain.launch.running.session import RunLimits, OutputOptions, run_launch
command = [sys.executable, "-uc", sys.argv[1]]
sys.exit(run_launch(command, OutputOptions(Path("logs")), RunLimits(), process_names=ALONE))
"""
MUCH = "while True: print('x' * 99)"
Launched = subprocess.Popen[bytes]
Begin = Callable[..., Launched]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """begin(script, **streams): a launch of one process, whose logs are in tmp_path/logs."""
    started: list[Launched] = []

    def start(script: str, *before: str, **streams: object) -> Launched:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        environment.pop("PYTHONUNBUFFERED", None)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(
            subprocess.Popen(  # type: ignore[call-overload]
                [*before, sys.executable, "-c", LAUNCH, script],
                cwd=tmp_path,
                env=environment,
                **{**pipes, **streams},
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:  # Only a failed test leaves one; its guard ends the other.
            process.kill()
        process.communicate()


def wait_until_it_stands(log: Path) -> None:
    """Until the launch waits for its reader: it writes no more of what never ends."""
    sizes = [-1, 0]
    deadline = time.monotonic() + 30
    while sizes[-1] < 32768 or sizes[-1] != sizes[-2]:
        assert time.monotonic() < deadline, sizes
        time.sleep(0.3)
        sizes.append(log.stat().st_size if log.exists() else 0)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGINT, signal.SIGTERM]])
def test_a_signal_ends_a_run_whose_reader_has_halted(
    signals: list[signal.Signals], begin: Begin, tmp_path: Path
) -> None:
    """It has more to show then, which must not wait either."""
    unfinished = "import sys; sys.stderr.write('unfinished')\n"
    process = begin(unfinished + MUCH, stderr=subprocess.STDOUT)
    wait_until_it_stands(tmp_path / "logs/rank.0/stdout")
    for number in signals:
        process.send_signal(number)
        time.sleep(0.2)
    assert process.wait(8) == 130


def test_what_a_slow_reader_has_not_taken_yet_is_shown_at_the_end(
    begin: Begin, tmp_path: Path
) -> None:
    process = begin("for i in range(50_000): print(i)")
    wait_until_it_stands(tmp_path / "logs/rank.0/stdout")
    stdout, _ = process.communicate(timeout=30)
    assert stdout == b"".join(b"%d\n" % i for i in range(50_000))
    assert process.returncode == 0


def test_a_run_goes_on_without_a_terminal_that_takes_nothing(begin: Begin, tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = begin("for i in range(3): print(i)", stdout=full)
        _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr.decode()) == (
        0,
        "\ncannot write standard output: No space left on device; the run continues, and its "
        "output is in "
        "logs\n",
    )
    assert (tmp_path / "logs/rank.0/stdout").read_bytes() == b"0\n1\n2\n"


def test_a_run_ends_with_grace_when_nobody_reads(begin: Begin, tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved'))\n"
        "while True: print('x'); time.sleep(0.1)"
    )
    process = begin(script)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(8) == 143
    assert process.stderr.read() == (
        b"\nthe output is no longer being read: stopping the run (repeat to stop at once)\nsaved\n"
    )
    assert (tmp_path / "logs/rank.0/stderr").read_bytes() == b"saved\n"


def test_under_nohup_a_hangup_means_nothing(begin: Begin, tmp_path: Path) -> None:
    script = "import time; print('begun'); time.sleep(1.5); print('done')"
    process = begin(script, "nohup")
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == b"done\n"
    assert process.wait(8) == 0


SEEN = """
import json, os, shutil, sys
from pathlib import Path
seen = sys.stdout.isatty(), sys.stderr.isatty(), *shutil.get_terminal_size()
Path(f"seen.{os.environ['HOROVOD_RANK']}").write_text(json.dumps(seen))
"""
AS_RANK = "import os; os.execv({0!r}, [{0!r}, '-P', '-m', 'hvdtrain.worker', {1!r}])"


@pytest.mark.parametrize(
    ("rank", "columns", "streams", "seen"),
    [
        ("0", None, ("stdout", "stderr"), [True, True, 101, 33]),
        ("0", None, ("stderr",), [False, True, 101, 33]),
        ("0", "70", ("stdout",), [True, False, 70, 33]),
        ("0", None, (), [False, False, 80, 24]),
        ("1", None, ("stdout", "stderr"), [False, False, 101, 33]),
    ],
)
def test_a_script_sees_the_terminal_and_its_size(
    rank: str,
    columns: str | None,
    streams: tuple[str, ...],
    seen: list[object],
    begin: Begin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", rank)
    for name, value in (("COLUMNS", columns), ("LINES", None)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(SEEN)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    process = begin(AS_RANK.format(sys.executable, "train.py"), **dict.fromkeys(streams, theirs))
    try:
        process.communicate(timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert json.loads((tmp_path / f"seen.{rank}").read_text()) == seen


@pytest.mark.parametrize(
    ("limit", "named"),
    [("-n 20", "20 open files (ulimit -n)"), ("-f 0", "0 blocks in a file (ulimit -f)")],
)
def test_limits_under_which_nothing_runs_are_one_message(
    limit: str, named: str, tmp_path: Path
) -> None:
    # The file that the launch would make is how far it may get: none.
    command = f"ulimit {limit}; exec {sys.executable} -P -m hvdtrain.cli run -np 1 --log-dir logs train.py"
    (tmp_path / "train.py").write_text("print('hi')")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: this shell allows only {named}")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "logs").exists()
