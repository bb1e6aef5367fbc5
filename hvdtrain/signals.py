"""Which signals end a command, how it exits then, and how its end is reported."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hvdtrain.environment import EXIT_INTERRUPTED, EXIT_SIGNAL_BASE

_PR_SET_PDEATHSIG = 1


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a run. SIGHUP (a closed terminal) is not among them if it is ignored, as under nohup."""
    hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangup else []))


def shell_code(returncode: int) -> int:
    """The exit code that a shell would report; Python reports a process that a signal ended as -signal."""
    return returncode if returncode >= 0 else EXIT_SIGNAL_BASE - returncode


def heed_children() -> None:
    """Restore SIGCHLD: where a parent ignores it (`trap '' CHLD`), the system forgets how children ended."""
    with suppress(ValueError):  # Not in the main thread.
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def quit_on_ctrl_c() -> None:
    """Call this first in a program: Ctrl-C ends it at once and without a word wherever it has nothing to clean up.

    Elsewhere, within `interruptible`, it is KeyboardInterrupt, which Python would print in an import or at its end.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Not where it is ignored.
        signal.signal(signal.SIGINT, _quit)


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here; see `quit_on_ctrl_c`."""
    quits = signal.getsignal(signal.SIGINT) is _quit
    if quits:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if quits:
            signal.signal(signal.SIGINT, _quit)


def listen_for_warnings() -> None:
    """Call this first: a warning that comes early waits until `supervise` of hvdtrain.start takes it.

    The handler never runs; it shows in /proc that a warning does not end this process. The mask
    does not: it is lifted while `supervise` waits.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        signal.signal(number, lambda number, frame: None)


def at_parents_end(number: signal.Signals) -> Callable[[], object]:
    """A function after which the kernel sends this signal to its caller when the caller's parent ends."""
    import ctypes  # Programs that call nothing here start sooner.

    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, number)


def outlive_signals() -> None:
    """Signals do not end this process; what it starts is ended by them, as usual.

    Except SIGUSR1, the warning of a job that will end, and SIGUSR2, which shows stacks: until a rank listens for them
    they are lost, and not deadly.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)  # Not inherited, where an ignored one is.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP unless it is ignored, take the way of Ctrl-C: what was started is ended."""
    numbers = set(ending_signals()) - {signal.SIGINT}
    before = {number: signal.signal(number, _leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_SIGNAL_BASE + number)
