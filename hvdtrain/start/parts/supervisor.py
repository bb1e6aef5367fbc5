"""Supervise a launcher until it ends: forward signals to it, warnings to all ranks, and news of the ranks to
`hvdtrain run`."""

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
from typing import NoReturn

from hvdtrain.environment import (
    CONTROL_PIPE,
    EXIT_FAILURE,
    EXIT_SIGNAL_BASE,
    GRACE_SECONDS,
    STATUS_PIPE,
)
from hvdtrain.launch.running.line_splitter import Lines
from hvdtrain.launch.running.outcome import how_it_ended
from hvdtrain.launch.running.rank_monitor import RankStatus, as_json, from_json
from hvdtrain.launch.running.time_limits import ENDING_SECONDS, REPEAT_SECONDS
from hvdtrain.launch.ssh import SSH_FAILED
from hvdtrain.signals import ending_signals, shell_code
from hvdtrain.start.parts.agents import BEAT_SECONDS, Agents
from hvdtrain.start.parts.news_pipe import NewsPipe
from hvdtrain.start.parts.output_tags import tell
from hvdtrain.start.parts.rank_watch import LEAVING_SECONDS, LOOK_SECONDS, RankWatch
from hvdtrain.worker.proc_files import name_of

TICK_SECONDS = 0.5
TOGETHER_SECONDS = 0.2
"""A signal that ends all processes of a launch reaches this one at most this long after the launcher."""
_BY_KERNEL = 0x80
"""si_code (siginfo.h) of a signal sent by the kernel, not by a process."""


def supervise(run: Callable[[], int], launch_id: str, agents: Agents) -> int:
    """Call `run` in a forked process, which may exec another program, and return its exit code.

    SIGUSR1 to this process warns the ranks on all hosts, and SIGUSR2 makes them print their stacks; the run continues.
    SIGINT, SIGTERM and SIGHUP (unless ignored) end the run on all hosts: ranks whose script has a handler for the
    signal receive it and get HVDTRAIN_GRACE_SECONDS; a second signal ends everything at once.
    """
    ending = ending_signals()
    watched = {*ending, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    # The launcher is Horovod's own code, patched for this launch and with what the agents have reported. A separate
    # program would have to load and learn all that again.
    child = os.fork()
    if child == 0:
        _be_the_launcher(run, before - {signal.SIGUSR1, signal.SIGUSR2}, agents)
    ranks = _AllRanks(launch_id, agents)
    end = _End(child, ranks)
    while True:
        received = signal.sigtimedwait(watched, TICK_SECONDS)
        number = received.si_signo if received else None
        if received and number in ending:
            end.ask(received)
        elif number == signal.SIGUSR1:
            ranks.warn()
        elif number == signal.SIGUSR2:
            ranks.show_stacks()
        is_mpirun = end.is_mpirun()
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            ranks.tick()
            ranks.look_again()
            if code == 0 and not end.code:
                ranks.see_off()
            if code < 0 and not signal.sigtimedwait(ending, TOGETHER_SECONDS):
                end.tell_what_ended(is_mpirun, code)
            elif code:
                end.has_lost_hosts()
            return end.code_of(shell_code(code))
        ranks.tick()
        end.tick()


class _AllRanks:
    """The ranks on this host and, through the agents, on all others."""

    def __init__(self, launch_id: str, agents: Agents) -> None:
        self._agents = agents
        self._here = RankWatch(launch_id)
        self._elsewhere: dict[str, list[RankStatus]] = {}
        self._unanswered: set[str] = set()
        self._leaving: set[str] = set()
        self._news = NewsPipe(_pipe(STATUS_PIPE))
        self._orders, self._lines = _pipe(CONTROL_PIPE), Lines()
        self._beaten = float("-inf")
        for host in agents.hosts:
            self._news.send({"host": host, "stopped": []})

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
        """Return whether a script is still handling the signal of `pass_on`."""
        ranks = [self._here.look(), *self._elsewhere.values()]
        return bool(self._unanswered) or any(one.ending for some in ranks for one in some)

    def lost_hosts(self) -> list[str]:
        """Describe how each lost connection to a host, or its agent, ended."""
        return [how_lost(host, *end) for host, end in self._agents.ended().items()]

    def end_elsewhere(self) -> None:
        self._agents.end()

    def end_missed(self) -> None:
        self._here.end_missed()

    def tick(self) -> None:
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            self._beaten = time.monotonic()
            self._agents.beat()
        self._obey()
        for host, news in self._agents.news(0):
            if news.get("without"):
                self._elsewhere.pop(host, None)
                self._news.send({"without": host}, once=True)
                continue
            with suppress(KeyError, TypeError):
                self._elsewhere[host] = from_json(news["ranks"], host)
                self._tell_of(self._elsewhere[host])
                self._news.send({"host": host, "stopped": news["stopped"]})
            if "answer" in news:
                self._unanswered.discard(host)
            if news.get("left"):
                left = f"{', '.join(news['left'])} on host {host}"
                self._news.send({"left": left}, once=True)
            if news.get("leaving"):
                self._leaving.add(host)
            else:
                self._leaving.discard(host)
        for statuses in self._here.tick():
            self._tell_of(statuses)
            if names := self._here.end_left_behind():
                self._news.send({"left": ", ".join(names)}, once=True)

    def _obey(self) -> None:
        """End the ranks that `hvdtrain run` asks to end."""
        with suppress(BlockingIOError):
            for line in self._lines.lines(os.read(self._orders, 65536) if self._orders else b""):
                match json.loads(line):
                    case {"end": int(pid), "host": ""}:
                        self._here.end(pid)
                    case {"end": int(pid), "host": str(host)}:
                        self._agents.order(host, end=pid)

    def look_again(self) -> None:
        """Report the final state of the ranks on this host."""
        self._tell_of(self._here.look())

    def see_off(self) -> None:
        """Wait briefly for processes that scripts left behind on any host, and end them: mpirun does not wait."""
        self._here.end_left_behind()
        self._unanswered = set(self._agents.hosts)
        self._agents.order_all(look=True)
        deadline = time.monotonic() + LEAVING_SECONDS + LOOK_SECONDS + TICK_SECONDS
        while self._unanswered or self._leaving or self._here.is_left:
            if time.monotonic() > deadline:
                return
            time.sleep(TICK_SECONDS / 10)
            self.tick()

    def _tell_of(self, statuses: list[RankStatus]) -> None:
        """Report each rank in a line of its own."""
        for one in statuses:
            self._news.send({"ranks": as_json([one])})


@dataclass
class _End:
    """Ends a run early.

    Attributes:
        child: Process ID of the launcher.
        ranks: Ranks on all hosts.
        code: Exit code for a launcher that was asked to end, and did so by itself; 0 if it was not asked.
        lost: Whether the connection to a host was lost.
    """

    child: int
    ranks: _AllRanks
    code: int = 0
    lost: bool = False
    _grace_until: float | None = None
    _ended_at: float | None = None
    _repeated: bool = False
    _signal: signal.Signals = field(default=signal.SIGTERM)

    def code_of(self, launcher: int) -> int:
        """Return the exit code of the run, given that of its launcher."""
        killed = launcher > EXIT_SIGNAL_BASE
        return EXIT_FAILURE if self.lost else launcher if killed else self.code or launcher

    def tell_what_ended(self, is_mpirun: bool, code: int) -> None:
        """Report that a signal ended the launcher, unless it was asked to end."""
        if self._ended_at is None:
            what = "mpirun" if is_mpirun else "Horovod's launcher"
            how = how_it_ended(shell_code(code))
            tell(f"{what} (process {self.child}), which starts the ranks and waits for them, {how}")

    def ask(self, received: signal.struct_siginfo) -> None:
        """Handle a signal from the user or another process. The second one ends everything at once."""
        if self._grace_until is not None:
            self._end()
            return
        number = signal.Signals(received.si_signo)
        # `hvdtrain run` forwards the user's signals; those of the terminal come from the kernel.
        if received.si_pid != os.getppid() and received.si_code != _BY_KERNEL:
            name = name_of(received.si_pid) or "has ended"
            tell(
                f"horovodrun (process {os.getpid()}) was sent {number.name} by process {received.si_pid} ({name})"
            )
        self.code = EXIT_SIGNAL_BASE + number
        self._signal = number
        self._grace_until = time.monotonic() + float(os.environ.get(GRACE_SECONDS, 0))
        self.ranks.pass_on(number)
        self.tick()

    def tick(self) -> None:
        now = time.monotonic()
        if self._ended_at is not None:
            if now - self._ended_at > ENDING_SECONDS:
                self._send(signal.SIGKILL)
            elif now - self._ended_at > REPEAT_SECONDS and not self._repeated:
                self._repeated = True
                if self.is_mpirun():
                    self._send(self._signal)
                else:
                    self.ranks.end_missed()
        elif self._grace_until is not None:
            if now >= self._grace_until or not self.ranks.are_ending():
                self._end()
        elif self.has_lost_hosts():
            self._end()

    def has_lost_hosts(self) -> bool:
        """Return whether hosts were lost before anything else ended the run, and report them."""
        if self._grace_until is None and not self.lost and (lost := self.ranks.lost_hosts()):
            self.lost = True
            for one in lost:
                tell(one)
        return self.lost

    def _end(self) -> None:
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self.ranks.end_elsewhere()
            self._send(self._signal)

    def is_mpirun(self) -> bool:
        """Return whether the launcher leads a process group, as mpirun does (see `start_ranks`)."""
        return os.getpgid(self.child) == self.child

    def _send(self, number: signal.Signals) -> None:
        os.kill(self.child, number)


def how_lost(host: str, code: int, words: str) -> str:
    """Explain why a host's agent has ended, from the exit code of its ssh (negative: a signal's) and the last words."""
    broke = f"the connection to host {host} was lost"
    last = words.strip().rpartition("\n")[2].strip()
    if code < 0:
        return f"{broke}: the local ssh process that ran its agent {how_it_ended(shell_code(code))}"
    if code == SSH_FAILED:
        return f"{broke} ({last})" if last else f"{broke}, or hvdtrain's agent there was killed"
    return f"hvdtrain's agent on host {host} failed (exit code {code}){f': {last}' if last else ''}"


def _pipe(name: str) -> int | None:
    """Return the descriptor of the pipe with this name, set to non-blocking, or None if `hvdtrain run` passed none."""
    descriptor = os.environ.get(name, "")
    if not descriptor.isdecimal():
        return None
    os.set_blocking(int(descriptor), False)
    return int(descriptor)


def _be_the_launcher(
    run: Callable[[], int], mask: set[signal.Signals | int], agents: Agents
) -> NoReturn:
    """In the forked process, call `run` and exit. Signals meant for the ranks must not kill its programs."""
    code = EXIT_FAILURE
    try:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        for name in (STATUS_PIPE, CONTROL_PIPE):
            if (descriptor := _pipe(name)) is not None:
                os.close(descriptor)
            os.environ.pop(name, None)
        agents.forget()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = run()
    except KeyboardInterrupt:
        code = EXIT_SIGNAL_BASE + signal.SIGINT
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else EXIT_FAILURE
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # For multiprocessing; sys.exit would unwind into the caller's frames.
        sys.stdout.flush()
        sys.stderr.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
