"""Stand by a launcher until it ends: signals go on to it, warnings to all ranks, and what the ranks do to who asks."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from hvdtrain.environment import EXIT_FAILURE, EXIT_SIGNAL_BASE, GRACE_SECONDS, NEWS
from hvdtrain.launch.running.lookout import RankStatus, as_json, from_json
from hvdtrain.signals import ending_signals
from hvdtrain.start.agents import BEAT_SECONDS, Agents
from hvdtrain.start.host_watch import HostWatch

TICK_SECONDS = 0.5
ENDING_SECONDS = 10.0
"""What a launcher may take to end its ranks. mpirun waits for ever for a host that is cut off."""


def supervise(run: Callable[[], int], launch_id: str, agents: Agents) -> int:
    """Run `run` in a process of its own, which may become another program; returns its exit code.

    SIGUSR1 to this process warns the ranks on all hosts, and SIGUSR2 shows their stacks; the run goes on. SIGINT,
    SIGTERM and SIGHUP (unless it is ignored) end the run on all hosts: ranks whose script has a handler for the
    signal get it, and HVDTRAIN_GRACE_SECONDS; a second signal ends all at once.
    """
    ending = ending_signals()
    watched = {*ending, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if child == 0:
        _be_the_launcher(run, before - {signal.SIGUSR1, signal.SIGUSR2})
    ranks = _AllRanks(launch_id, agents)
    end = _End(child, ranks)
    while True:
        received = signal.sigtimedwait(watched, TICK_SECONDS)
        number = received.si_signo if received else None
        if number == signal.SIGUSR1:
            ranks.warn()
        elif number == signal.SIGUSR2:
            ranks.show_stacks()
        elif number in ending:
            end.ask(signal.Signals(number))
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            ranks.look_again()
            return (code or end.code) if code >= 0 else EXIT_SIGNAL_BASE - code
        ranks.tick()
        end.tick()


class _AllRanks:
    """The ranks on this host and, through the agents, on all others."""

    def __init__(self, launch_id: str, agents: Agents) -> None:
        self._agents = agents
        self._here = HostWatch(launch_id)
        self._elsewhere: dict[str, list[RankStatus]] = {}
        self._unanswered: set[str] = set()
        self._pipe = _news_pipe()
        self._beaten = float("-inf")

    def warn(self) -> None:
        self._here.warn()
        self._agents.order_all(warn=None)

    def show_stacks(self) -> None:
        self._here.show_stacks()
        self._agents.order_all(stacks=True)

    def pass_on(self, number: int) -> None:
        self._here.pass_on(number)
        self._unanswered = set(self._agents.hosts)
        self._agents.order_all(signal=number)

    def are_ending(self) -> bool:
        """Whether a script is still at what it does when the signal of `pass_on` comes."""
        ranks = [self._here.look(), *self._elsewhere.values()]
        return bool(self._unanswered) or any(one.ending for some in ranks for one in some)

    def lost_hosts(self) -> list[str]:
        return list(self._agents.ended())

    def end_elsewhere(self) -> None:
        self._agents.end()

    def tick(self) -> None:
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            self._beaten = time.monotonic()
            self._agents.beat()
        for host, news in self._agents.news(0):
            with suppress(KeyError, TypeError):
                self._elsewhere[host] = from_json(news["ranks"], host)
                self._tell_of(self._elsewhere[host])
            if "passed_on" in news:
                self._unanswered.discard(host)
            if "left" in news:
                self._tell(left=f"{', '.join(news['left'])} on host {host}")
        for statuses in self._here.tick():
            self._tell_of(statuses)
            if names := self._here.end_left_behind():
                self._tell(left=", ".join(names))

    def look_again(self) -> None:
        """Tell how the ranks on this host were at their end."""
        self._tell_of(self._here.look())

    def _tell_of(self, statuses: list[RankStatus]) -> None:
        """A line for each rank, none longer than what a pipe takes whole."""
        for one in statuses:
            self._tell(ranks=as_json([one]))

    def _tell(self, **news: object) -> None:
        try:
            if self._pipe is not None:
                os.write(self._pipe, json.dumps(news).encode() + b"\n")
        except BlockingIOError:
            pass  # The reader is halted; it will be told again.
        except OSError:
            self._pipe = None  # Nobody asks any more.


@dataclass
class _End:
    """How a run is ended before its time.

    Attributes:
        child: the launcher.
        code: the exit code of a launch that was ended and says that all is well.
    """

    child: int
    ranks: _AllRanks
    code: int = 0
    _grace_until: float | None = None
    _ended_at: float | None = None
    _signal: signal.Signals = field(default=signal.SIGTERM)

    def ask(self, number: signal.Signals) -> None:
        """The user's signal; the second one ends all at once."""
        if self._grace_until is not None:
            self._end()
            return
        self.code = EXIT_SIGNAL_BASE + number
        self._signal = number
        self._grace_until = time.monotonic() + float(os.environ.get(GRACE_SECONDS, 0))
        self.ranks.pass_on(number)
        self.tick()

    def tick(self) -> None:
        now = time.monotonic()
        if self._ended_at is not None:
            if now - self._ended_at > ENDING_SECONDS:
                os.kill(self.child, signal.SIGKILL)
        elif self._grace_until is not None:
            if now >= self._grace_until or not self.ranks.are_ending():
                self._end()
        elif lost := self.ranks.lost_hosts():
            self.code = EXIT_FAILURE
            print(f"hvdtrain: the connection to host {', '.join(lost)} broke", file=sys.stderr)
            self._end()

    def _end(self) -> None:
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self.ranks.end_elsewhere()
            os.kill(self.child, self._signal)


def _news_pipe() -> int | None:
    """Where to tell what the ranks do, if somebody wants to know; never waits for its reader."""
    descriptor = os.environ.get(NEWS, "")
    if not descriptor.isdecimal():
        return None
    os.set_blocking(int(descriptor), False)
    return int(descriptor)


def _be_the_launcher(run: Callable[[], int], mask: set[signal.Signals | int]) -> None:
    """In the new process: run, and exit. Its programs must not be ended by what is for the ranks."""
    code = EXIT_FAILURE
    try:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        if (descriptor := _news_pipe()) is not None:
            os.close(descriptor)
        os.environ.pop(NEWS, None)
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
