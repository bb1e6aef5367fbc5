"""Start programs, read what they write, find the processes of a launch, and end them.

Every process of a launch carries the launch's id in its environment, and is found by it in /proc: horovodrun's ranks
are not simply its children. Over Gloo each hangs under a helper process in a session of its own; mpirun puts each in
its own process group. Processes on other hosts have an agent there, which does the same.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hvdtrain.environment import LAUNCH_ID
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.running.ending import TERM_SECONDS
from hvdtrain.signals import at_parents_end
from hvdtrain.worker.heartbeat import has_page_of

DRAIN_SECONDS = 1.0
"""How long to wait for more output after a process has ended: others may still hold its pipes."""
_POLL_SECONDS = 0.02


class CannotStart(HvdtrainError):
    """A program cannot be started; `__cause__` is the OSError."""

    exit_code = 127


def start(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    stdin: int | None = subprocess.PIPE,
    output: int | None = subprocess.PIPE,
    merge: bool = False,
    session: bool = True,
    pass_fds: Collection[int] = (),
    dies_with_us: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program.

    Args:
        argv: the program and its arguments.
        environ: its complete environment.
        stdin, output: as in subprocess; None: inherited.
        merge: what it writes to standard error goes where its standard output goes.
        session: start it in a new session, where Ctrl-C in the terminal does not reach it.
        pass_fds: descriptors that it inherits.
        dies_with_us: have the kernel kill it when this process ends. Call from a process without threads.

    Raises:
        CannotStart: the program does not exist or may not be run, or a limit of the system is reached.
    """
    try:
        return subprocess.Popen(
            argv,
            env=environ,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT if merge else output,
            start_new_session=session,
            pass_fds=pass_fds,
            preexec_fn=at_parents_end(signal.SIGKILL) if dies_with_us else None,
        )
    except OSError as error:
        raise CannotStart(f"cannot start {argv[0]}: {error.strerror}") from error


class Pipes:
    """Reads from several named pipes, whichever has data, and closes them when they end."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, name: Any, pipe: BinaryIO | int) -> None:
        self._selector.register(pipe, selectors.EVENT_READ, name)

    def add_output(self, process: subprocess.Popen[bytes], stdout: Any, stderr: Any) -> None:
        """Add the two pipes of a process of `start`, under these names."""
        self.add(stdout, process.stdout)  # type: ignore[arg-type]
        self.add(stderr, process.stderr)  # type: ignore[arg-type]

    @property
    def names(self) -> set[Any]:
        """The pipes that are still open."""
        return {key.data for key in self._selector.get_map().values()}

    def read(self, seconds: float) -> list[tuple[Any, bytes]]:
        """Wait up to `seconds` for data; return (name, bytes) of each pipe that has some. b"" is the end of a pipe."""
        came = []
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 65536)
            if not data:
                self._close(key)
            came.append((key.data, data))
        return came

    def drop(self, *names: Any) -> None:
        """Close these."""
        for key in list(self._selector.get_map().values()):
            if key.data in names:
                self._close(key)

    def rest(self, *names: Any) -> Iterator[tuple[Any, bytes]]:
        """Read what is left in these pipes of a process that has ended.

        One read takes all that it wrote. Other processes that hold the pipes may write for ever: they get
        DRAIN_SECONDS.
        """
        deadline = time.monotonic() + DRAIN_SECONDS
        left = DRAIN_SECONDS
        while left > 0 and self.names & set(names):
            yield from self.read(left)
            left = deadline - time.monotonic()

    def close(self) -> None:
        """Close all."""
        self.drop(*self.names)
        self._selector.close()

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        if not isinstance(key.fileobj, int):
            key.fileobj.close()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ProcessState:
    """From /proc: the id of the parent, the signals that the process has handlers for, whether a signal stopped it."""

    parent: int
    caught: frozenset[int]
    stopped: bool = False


def parse_status(text: str) -> ProcessState:
    """The state in /proc/PID/status."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    bits = int(fields["SigCgt"], 16)
    return ProcessState(
        int(fields["PPid"]),
        frozenset(number for number in range(1, 65) if bits >> (number - 1) & 1),
        fields["State"].split()[0] == "T",
    )


def state_of(pid: int) -> ProcessState:
    """The state of a process. Raises OSError if it has ended."""
    return parse_status((Path("/proc") / str(pid) / "status").read_text())


def processes_of(launch_id: str) -> list[int]:
    """The ids of all processes of the launch on this host, also of ranks that have overwritten their environment."""
    mark = f"{LAUNCH_ID}={launch_id}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Other users' processes cannot be read, and processes end during the scan.
        with contextlib.suppress(OSError):
            environ = (entry / "environ").read_bytes()
            if mark in environ.split(b"\0") or (
                # Without a PATH it may be overwritten; kernel threads have none at all.
                environ and b"PATH=" not in environ and has_page_of(int(entry.name), launch_id)
            ):
                found.append(int(entry.name))
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with. Raises OSError if it has ended, or is another user's."""
    entries = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def name_of(pid: int) -> str:
    """The name of a process (comm); empty if it has ended."""
    try:
        return (Path("/proc") / str(pid) / "comm").read_text().rstrip("\n")
    except OSError:
        return ""


def signal_launch(launch_id: str, how: signal.Signals) -> bool:
    """Signal all processes of the launch, with SIGKILL until none is left. Returns whether the last scan found any."""
    found: list[int] = []
    for _ in range(20):
        found = processes_of(launch_id)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        if not found or how != signal.SIGKILL:
            break
        time.sleep(2 * _POLL_SECONDS)
    return bool(found)


def end_launch(launch_id: str) -> None:
    """End all processes of the launch on this host: SIGTERM, and SIGKILL to what is left after TERM_SECONDS."""
    deadline = time.monotonic() + TERM_SECONDS
    there = signal_launch(launch_id, signal.SIGTERM)
    while there and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        there = bool(processes_of(launch_id))
    if there:
        signal_launch(launch_id, signal.SIGKILL)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended. It is not reaped here, so its id cannot belong to another process yet."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return process.returncode is not None or os.waitid(os.P_PID, process.pid, how) is not None
    except ChildProcessError:  # Another thread has waited for it.
        return True


def end_groups(processes: Collection[subprocess.Popen[bytes]], seconds: float) -> None:
    """End programs of `start` with their process groups: SIGTERM, and SIGKILL after `seconds`."""
    _signal_groups(processes, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while not all(map(has_ended, processes)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _signal_groups(processes, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):  # It hangs in the kernel.
            process.wait(TERM_SECONDS)


def _signal_groups(processes: Collection[subprocess.Popen[bytes]], how: signal.Signals) -> None:
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
