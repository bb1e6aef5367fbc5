"""Stand by a launcher until it ends: signals go on to it, warnings to all ranks."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from hvdtrain.environment import EXIT_FAILURE, EXIT_SIGNAL_BASE
from hvdtrain.launch.running.ranks import Warner
from hvdtrain.signals import ending_signals
from hvdtrain.start.keepers import Keepers

TICK_SECONDS = 0.5
ENDING_SECONDS = 10.0
"""What a launcher may take to end its ranks. mpirun waits for ever for a host that is cut off."""


def listen_for_warnings() -> None:
    """Call this first: a warning that comes early waits until `supervise` takes it.

    The handler never runs; it shows in /proc that a warning does not end this process. The mask
    does not: it is lifted while `supervise` waits.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGUSR1, lambda number, frame: None)


def supervise(run: Callable[[], int], launch_id: str, keepers: Keepers) -> int:
    """Run `run` in a process of its own, which may become another program; returns its exit code.

    SIGUSR1 to this process warns the ranks on all hosts, and the run goes on. SIGINT, SIGTERM and
    SIGHUP (unless it is ignored) end the run on all hosts.
    """
    ending = ending_signals()
    watched = {*ending, signal.SIGUSR1, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if child == 0:
        _be_the_launcher(run, before - {signal.SIGUSR1})
    warner = Warner(launch_id)
    ending_since: float | None = None
    ended_by = 0  # The exit code of a launch that was ended, and says that all is well.
    while True:
        received = signal.sigtimedwait(watched, TICK_SECONDS)
        number = received.si_signo if received else None
        if number == signal.SIGUSR1:
            warner.warn()
            keepers.warn()
        elif number in ending:
            ending_since = ending_since or time.monotonic()
            ended_by = ended_by or EXIT_SIGNAL_BASE + (number or 0)
            keepers.end()
            os.kill(child, number or signal.SIGTERM)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return (code or ended_by) if code >= 0 else EXIT_SIGNAL_BASE - code
        warner.tick()
        keepers.beat()
        if ending_since is not None:
            if time.monotonic() - ending_since > ENDING_SECONDS:
                os.kill(child, signal.SIGKILL)
        elif lost := keepers.lost():
            ending_since, ended_by = time.monotonic(), EXIT_FAILURE
            print(f"hvdtrain: the connection to host {', '.join(lost)} broke", file=sys.stderr)
            os.kill(child, signal.SIGTERM)


def _be_the_launcher(run: Callable[[], int], mask: set[signal.Signals | int]) -> None:
    """In the new process: run, and exit. Its programs must not be ended by a warning to all."""
    code = EXIT_FAILURE
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = run()
    except KeyboardInterrupt:
        code = EXIT_SIGNAL_BASE + signal.SIGINT
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else EXIT_FAILURE
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # Those of multiprocessing; the caller's frames are not for here.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
