"""The processes that an agent has started itself: their output and their ends, told as news."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.environment import EXIT_SIGNAL_BASE
from hvdtrain.launch.running.process import state_of
from hvdtrain.start.host_watch import GRACE_SECONDS

DRAIN_SECONDS = 0.5
"""How long a process's output is waited for after its end."""
_PR_SET_PDEATHSIG = 1


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    streams: int = 2
    ended_at: float | None = None


@dataclass
class HostProcesses:
    """Processes by number. If this process is killed, so are they.

    Attributes:
        selector: where their output is registered, with (number, descriptor).
        tell: takes the news: output=[number, descriptor, text], ended=[number, exit code].
    """

    selector: selectors.BaseSelector
    tell: Callable[..., None]
    _running: dict[int, _Process] = field(default_factory=dict)
    _to_warn: set[int] = field(default_factory=set)

    def start(self, number: int, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start one, in a session of its own."""
        try:
            popen = subprocess.Popen(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_prepare_child(),
            )
        except OSError as error:
            text = f"cannot start {argv[0]}: {error.strerror}\n"
            self.tell(output=[number, 2, text])
            self.tell(ended=[number, 127])
            return
        assert popen.stdout is not None and popen.stderr is not None
        self._running[number] = _Process(popen)
        self.selector.register(popen.stdout, selectors.EVENT_READ, (number, 1))
        self.selector.register(popen.stderr, selectors.EVENT_READ, (number, 2))

    def pass_on(self, key: selectors.SelectorKey) -> None:
        """Read what one of them has written, and tell it."""
        number, descriptor = key.data
        data = os.read(key.fd, 65536)
        if data:
            # Any bytes: as many characters.
            self.tell(output=[number, descriptor, data.decode("latin-1")])
        else:
            self._close(key)

    def warn(self, number: int) -> None:
        """SIGUSR1 to this one, once it listens; before that it would be ended by it."""
        self._to_warn.add(number)

    def tick(self) -> None:
        """Tell of processes that have ended, once their output is passed on; warn."""
        now = time.monotonic()
        for number, one in list(self._running.items()):
            code = one.popen.poll()
            if code is None:
                continue
            one.ended_at = one.ended_at or now
            # What a process left behind may keep its output open.
            if one.streams and now - one.ended_at < DRAIN_SECONDS:
                continue
            for key in list(self.selector.get_map().values()):
                if key.data is not None and key.data[0] == number:
                    self._close(key)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.popen.pid, signal.SIGKILL)
            del self._running[number]
            self.tell(ended=[number, code if code >= 0 else EXIT_SIGNAL_BASE - code])
        for number in list(self._to_warn):
            waiting = self._running.get(number)
            with contextlib.suppress(OSError):
                if waiting is not None and signal.SIGUSR1 in state_of(waiting.popen.pid).caught:
                    self._to_warn.discard(number)
                    waiting.popen.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        """End all; their last words are lost."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(one.popen.poll() is None for one in self._running.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        """To whole process groups: also to what a script has started."""
        for one in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.popen.pid, number)

    def _close(self, key: selectors.SelectorKey) -> None:
        self.selector.unregister(key.fileobj)
        self._running[key.data[0]].streams -= 1
        key.fileobj.close()  # type: ignore[union-attr]


def _prepare_child() -> Any:
    """What a new process does first: signals as usual, and an end with the agent's."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return prepare
