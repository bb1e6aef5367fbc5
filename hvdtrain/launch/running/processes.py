"""Start programs, read their output, find the processes of a launch, and end them.

Every process of a launch has the launch ID in its environment, and is found by it in /proc, because horovodrun's ranks
are not simply its children. Over Gloo, each runs under a helper process in its own session; mpirun gives each its own
process group. Processes on other hosts are handled in the same way by an agent there.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from hvdtrain.environment import LAUNCH_ID
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.running.time_limits import TERM_SECONDS
from hvdtrain.signals import at_parents_end
from hvdtrain.worker.heartbeat import has_page_of
from hvdtrain.worker.proc_files import all_processes, folder_of

DRAIN_SECONDS = 1.0
"""Time to wait for more output after a process has ended, as others may still hold its pipes."""
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
        argv: Program and its arguments.
        environ: Complete environment of the program.
        stdin, output: As in subprocess; None inherits.
        merge: Whether to redirect standard error to standard output.
        session: Whether to start a new session, which the terminal's Ctrl-C does not reach.
        pass_fds: Descriptors to inherit.
        dies_with_us: Whether the kernel kills the program when this process ends. Requires a process without threads.

    Raises:
        CannotStart: The program does not exist or may not be run, or a limit of the system is reached.
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
    """Reads from several named pipes as data arrives, and closes each at its end."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, name: Any, pipe: BinaryIO | int) -> None:
        self._selector.register(pipe, selectors.EVENT_READ, name)

    def add_output(self, process: subprocess.Popen[bytes], stdout: Any, stderr: Any) -> None:
        """Add the two pipes of a process from `start`, under these names."""
        self.add(stdout, process.stdout)  # type: ignore[arg-type]
        self.add(stderr, process.stderr)  # type: ignore[arg-type]

    @property
    def names(self) -> set[Any]:
        """Names of the pipes that are still open."""
        return {key.data for key in self._selector.get_map().values()}

    def read(self, seconds: float) -> list[tuple[Any, bytes]]:
        """Wait up to `seconds` for data; return (name, bytes) for each pipe that has some. b"" marks its end."""
        came = []
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 65536)
            if not data:
                self._close(key)
            came.append((key.data, data))
        return came

    def drop(self, *names: Any) -> None:
        """Close these pipes."""
        for key in list(self._selector.get_map().values()):
            if key.data in names:
                self._close(key)

    def rest(self, *names: Any) -> Iterator[tuple[Any, bytes]]:
        """Read the remaining data from these pipes of a process that has ended.

        One read returns all that it wrote. Other processes that hold the pipes may write forever, so reading
        stops after DRAIN_SECONDS.
        """
        deadline = time.monotonic() + DRAIN_SECONDS
        left = DRAIN_SECONDS
        while left > 0 and self.names & set(names):
            yield from self.read(left)
            left = deadline - time.monotonic()

    def close(self) -> None:
        """Close all pipes."""
        self.drop(*self.names)
        self._selector.close()

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        if not isinstance(key.fileobj, int):
            key.fileobj.close()  # type: ignore[attr-defined]


def processes_of(launch_id: str) -> list[int]:
    """Return the IDs of all processes of the launch on this host, even if a rank has overwritten its environment."""
    mark = f"{LAUNCH_ID}={launch_id}".encode()
    found = []
    for pid in all_processes():
        # Other users' processes cannot be read, and processes end during the scan.
        with contextlib.suppress(OSError):
            environ = (folder_of(pid) / "environ").read_bytes()
            if mark in environ.split(b"\0") or (
                # Without PATH, the environment may be overwritten; kernel threads have none at all.
                environ and b"PATH=" not in environ and has_page_of(pid, launch_id)
            ):
                found.append(pid)
    return found


def signal_launch(launch_id: str, how: signal.Signals) -> bool:
    """Signal all processes of the launch, with SIGKILL until none is left.

    Returns:
        Whether the last scan found any process.
    """
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
    """End all processes of the launch on this host: SIGTERM, then SIGKILL after TERM_SECONDS for the rest."""
    deadline = time.monotonic() + TERM_SECONDS
    there = signal_launch(launch_id, signal.SIGTERM)
    while there and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        there = bool(processes_of(launch_id))
    if there:
        signal_launch(launch_id, signal.SIGKILL)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended. It is not reaped, so its ID cannot be reused by another process yet."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return process.returncode is not None or os.waitid(os.P_PID, process.pid, how) is not None
    except ChildProcessError:  # Another thread has reaped it.
        return True


def end_groups(processes: Collection[subprocess.Popen[bytes]], seconds: float) -> None:
    """End programs from `start`, with their process groups: SIGTERM, then SIGKILL after `seconds`."""
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
