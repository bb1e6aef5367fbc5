"""Signal handling of commands and ranks: which signals end a process, and the exit code that reports it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hvdtrain.environment import EXIT_INTERRUPTED, EXIT_SIGNAL_BASE

_PR_SET_PDEATHSIG = 1


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a run: without SIGHUP (a closed terminal) if it is ignored, as under nohup."""
    hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangup else []))


def shell_code(returncode: int) -> int:
    """Return the exit code that a shell would report for `returncode`, which Python sets to -N for signal N."""
    return returncode if returncode >= 0 else EXIT_SIGNAL_BASE - returncode


def heed_children() -> None:
    """Stop ignoring SIGCHLD: if a parent ignored it (`trap '' CHLD`), the exit codes of children would be lost."""
    with suppress(ValueError):  # Not in the main thread.
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def quit_on_ctrl_c() -> None:
    """Let Ctrl-C end this program at once and silently, except in an `interruptible` block. Call this first.

    Otherwise Python would print a KeyboardInterrupt's traceback from an import or from interpreter shutdown.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Not where it is ignored.
        signal.signal(signal.SIGINT, _quit)


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in this block; see `quit_on_ctrl_c`."""
    quits = signal.getsignal(signal.SIGINT) is _quit
    if quits:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if quits:
            signal.signal(signal.SIGINT, _quit)


def listen_for_warnings() -> None:
    """Keep SIGUSR1 and SIGUSR2 pending until `supervise` (hvdtrain.start) waits for them. Call this first.

    The handler never runs; it shows in /proc that these signals do not end this process. The mask does not show
    that, because it is lifted while `supervise` waits.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        signal.signal(number, lambda number, frame: None)


def at_parents_end(number: signal.Signals) -> Callable[[], object]:
    """Return a function that asks the kernel to send signal `number` to the calling process when its parent ends."""
    import ctypes  # Slow to import, and rarely needed.

    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, number)


def outlive_signals() -> None:
    """Let no signal end this process; SIGINT, SIGTERM and SIGHUP still end the processes that it starts.

    Those processes ignore SIGUSR1 (the job will end soon) and SIGUSR2 (print the stacks) until they install a handler,
    so that these signals cannot end them either.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A handler, which children do not inherit; they would inherit SIG_IGN.
        signal.signal(number, lambda number, frame: None)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP unless it is ignored, raise SystemExit in this block, so that cleanup runs."""
    numbers = set(ending_signals()) - {signal.SIGINT}
    before = {number: signal.signal(number, _leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_SIGNAL_BASE + number)
