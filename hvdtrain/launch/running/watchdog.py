"""Decide from the state of the ranks whether a run can continue, and which ranks block it.

Horovod's own stall check runs inside rank 0. It detects a rank that does not join a collective, but not one that is
frozen, never called init or has gone: with MPI, rank 0 itself waits for such a rank. With Gloo, it neither warns nor
ends the job, whatever its limits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdtrain.environment import HANG_SECONDS, STOPPED_SECONDS
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.running.process_names import ranks_in_words
from hvdtrain.launch.running.rank_monitor import RankStatus
from hvdtrain.launch.running.srun_tasks import SrunTasks
from hvdtrain.launch.running.stopped_programs import StoppedProgram
from hvdtrain.worker.heartbeat import INIT, WITH_BEATS

STILL_SECONDS = 20.0
"""Limit for a rank that is stopped, or gone before its end. Below Gloo's 30 s, after which Gloo blames other ranks."""
WAITING_SECONDS = 300.0
"""Limit for ranks that wait for others which do not come, for instance to init."""
UNHEARD_SECONDS = 60.0
"""Minimum limit without a report about a rank, even with a short `--hang-timeout`, as reports may be late."""
PAUSE_SECONDS = 5.0
"""A longer interval between calls of `verdict` means that the launcher was blocked by a reader of its output (Ctrl-S in
a terminal), and perhaps the ranks too."""
STALL_MARGIN_SECONDS = 10.0
"""Margin beyond the time in which Horovod's stall check detects a rank and ends the job."""
PROGRESS_SECONDS = 60.0
"""Seconds of work after init that count as progress in a script whose steps are not visible."""


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds; see the constants of this module.

    Attributes:
        still: Limit for a rank that is stopped or gone.
        waiting: Limit for ranks that wait for idle ones.
        busy: Limit for ranks that wait for ranks that compute, and for a run to end after all of its ranks.
        hang: Limit for a run without progress.
        apart: Limit while some ranks are in a step or collective and others are not. Infinite if left to Horovod.
        elastic: Whether ranks come and go, and are restarted when ended.
    """

    still: float = STILL_SECONDS
    waiting: float = WAITING_SECONDS
    busy: float = HANG_SECONDS
    hang: float = HANG_SECONDS
    apart: float = math.inf
    elastic: bool = False

    def longer_by(self, seconds: float) -> Limits:
        """Return the limits for ranks of which one has announced that it takes so long; `still` remains."""
        names = ("waiting", "busy", "hang", "apart")
        return replace(self, **{name: getattr(self, name) + seconds for name in names})


@dataclass(frozen=True)
class Verdict:
    """Why a run cannot continue; falsy while it can."""

    text: str = ""
    culprits: tuple[RankStatus, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text)


def stopped_seconds(environ: Mapping[str, str]) -> float:
    """Return the seconds after which a stopped process counts as hung, as passed on by `hvdtrain run`."""
    return float(environ.get(STOPPED_SECONDS, STILL_SECONDS))


def limits_of(hang: float, plan: LaunchPlan | None = None) -> Limits:
    """Return the limits of the watchdog. No limit except `busy` exceeds `--hang-timeout`.

    Args:
        hang: Value of `--hang-timeout`, in seconds.
        plan: Plan of Horovod's ranks. None for other processes.
    """
    elastic = plan is not None and plan.elastic
    apart = hang if elastic else math.inf
    if plan is not None and plan.stall_check and plan.stall_shutdown_seconds and not elastic:
        # Where Horovod's own check works, it names the collective, so it goes first.
        stall = plan.stall_warning_seconds + plan.stall_shutdown_seconds + STALL_MARGIN_SECONDS
        apart = min(hang, stall)
    return Limits(
        still=min(STILL_SECONDS, hang),
        waiting=min(WAITING_SECONDS, hang),
        busy=max(WAITING_SECONDS, hang),
        hang=hang,
        apart=apart,
        elastic=elastic,
    )


@dataclass
class Watchdog:
    """Watches the ranks of a launch through the reports about them.

    Attributes:
        limits: Limits for the ranks. None if they are not watched here.
        still: Seconds after which a stopped program between launcher and ranks counts as hung.
        statuses: Last state of every rank seen, by host and slot or rank there (ranks may be renumbered).
        steps: Maximum number of steps that a rank has finished in an epoch.
        working_since: Time at which the first rank was past init (time.monotonic()); 0 before.
        tasks: Reports of srun's tasks, if it started the ranks.
    """

    limits: Limits | None
    still: float = float("inf")
    statuses: dict[tuple[str, str], RankStatus] = field(default_factory=dict)
    steps: int = 0
    working_since: float = 0.0
    tasks: SrunTasks = field(default_factory=SrunTasks)
    _heard: dict[tuple[str, str], float] = field(default_factory=dict)
    _hosts: dict[str, float] = field(default_factory=dict)
    _dismissed: set[tuple[str, int]] = field(default_factory=set)
    _asked: float = float("inf")
    _resumed: float = float("-inf")

    def hear(self, statuses: Iterable[RankStatus]) -> None:
        """Record the state of a host's ranks."""
        for one in statuses:
            place = (one.host, one.slot or str(one.rank))
            before = self.statuses.get(place)
            if before is None or _process(before) != _process(one):
                self._begin_anew()
            elif before.state == "stopped" and one.state == "gone" and not self._is_elastic:
                one = before  # If killed while stopped, it counts as stopped.
            self.statuses[place] = one
            self._heard[place] = time.monotonic()
            if one.heartbeat is not None and one.phase not in ("starting", "init"):
                self.working_since = self.working_since or time.monotonic()
                self.steps = max(self.steps, one.heartbeat.step)

    def hear_host(self, name: str) -> None:
        """Record a report from a host, even if it has no ranks yet."""
        self._hosts[name] = time.monotonic()

    def forget_host(self, name: str) -> None:
        """Drop the ranks of a host that has left the job."""
        self._hosts.pop(name, None)
        for place in [place for place in self.statuses if place[0] == name]:
            del self.statuses[place]

    def dismiss(self, culprits: Iterable[RankStatus]) -> None:
        """Stop watching these ranks, which are being ended: the others wait for their replacements."""
        self._dismissed |= set(map(_process, culprits))
        self._begin_anew()

    def can_replace(self, culprits: Iterable[RankStatus]) -> bool:
        """Return whether these ranks are restarted if ended: once a rank has finished, an elastic job restarts others
        only if yet another is still running."""
        known = self.statuses.values()
        without = self._dismissed | set(map(_process, culprits))
        others = [one for one in known if one.state != "gone" and _process(one) not in without]
        return not any(one.has_ended for one in known) or not all(one.has_ended for one in others)

    @property
    def _is_elastic(self) -> bool:
        return self.limits is not None and self.limits.elastic

    def _begin_anew(self) -> None:
        """Restart the waiting times: in an elastic job, ranks that waited for a lost rank now wait for a new one."""
        if self._is_elastic:
            self._resumed = time.monotonic()

    def verdict(self, programs: Iterable[StoppedProgram] = ()) -> Verdict:
        """Return why the run cannot continue, if so."""
        now = time.monotonic()
        if now - self._asked > PAUSE_SECONDS:
            self._resumed = now
        self._asked = now
        awake = now - self._resumed
        late = (str(one) for one in programs if min(awake, one.held) >= self.still)
        return self._of_ranks(now, awake) or Verdict(next(late, ""))

    def _of_ranks(self, now: float, awake: float) -> Verdict:
        if self.limits is None:
            return Verdict()
        ranks = [
            _at_most(awake, one)
            for one in self.statuses.values()
            # The launcher of an elastic job notices by itself which ranks have gone.
            if not (
                self.limits.elastic and (one.state == "gone" or _process(one) in self._dismissed)
            )
        ]
        return self._unheard(now, awake, self.limits) or verdict(ranks, self.limits)

    def _unheard(self, now: float, awake: float, limits: Limits) -> Verdict:
        """Check for silent hosts and tasks, which report every few seconds whatever their ranks do."""
        limit = max(limits.waiting, UNHEARD_SECONDS)
        heard = {f"host {name}": at for name, at in self._hosts.items()} | {
            _name(one): self._heard[place]
            for place, one in self.statuses.items()
            if one.state != "gone" and one.host not in self._hosts and not self.tasks.hosts
        }
        found = {name: limit for name, at in heard.items() if min(awake, now - at) >= limit}
        found.update(self.tasks.silent(awake, limit))
        if not found:
            return Verdict()
        return Verdict(
            f"no report from {', '.join(found)} for {min(found.values()):g} s: have hvdtrain's processes "
            "there been stopped (`ps -eo pid,stat,args`)?"
        )

    def progress(self) -> str:
        """Describe the progress of the ranks. Empty if they finished no step and worked for less than a minute."""
        if self.steps > 0:
            return f"{self.steps} step{'s' if self.steps > 1 else ''}"
        worked = time.monotonic() - self.working_since if self.working_since else 0.0
        return f"{worked:.0f} s of work" if worked >= PROGRESS_SECONDS else ""

    def absent(self, failed: Container[int]) -> str:
        """Describe which ranks, other than those that `failed`, the others were waiting for. Empty if none is known.

        Called after the end of a run, which may have ended the ranks that are gone; so that reason comes last.
        """
        return _away([one for one in self.statuses.values() if one.rank not in failed], _AWAY)

    def missed_init(self) -> str:
        """Describe which ranks did not call init while others waited there until they aborted. Empty if unknown."""
        known = list(self.statuses.values())
        if not any(_meeting(one) == INIT for one in known):
            return ""
        unseen = set(range(max(one.size for one in known))) - {one.rank for one in known}
        never = f"{ranks_in_words(sorted(unseen))} ended or did not start, while others waited in {INIT}"
        return _away(known, _AWAY[:-1]) or (never if unseen else "")


def _process(one: RankStatus) -> tuple[str, int]:
    return one.host, one.pid


def _at_most(seconds: float, one: RankStatus) -> RankStatus:
    """Return the status with its durations limited to the time for which the rank has been watched."""
    held, idle, quiet = (min(seconds, since) for since in (one.held, one.idle, one.quiet))
    return replace(one, held=held, idle=idle, quiet=quiet)


_Way = tuple[Callable[[RankStatus], bool], str]
_AWAY: tuple[_Way, ...] = (
    (lambda one: one.state == "stopped", "stopped (SIGSTOP) while others waited for THEM"),
    (
        lambda one: one.phase == "starting",
        "missing: hvdtrain.init() was not called while others waited for THEM",
    ),
    (
        lambda one: one.has_ended,
        "missing: the script has ended there, but others still need THEM",
    ),
    (
        lambda one: one.state == "gone",
        "gone before the end of the script (os._exit?), but others still need THEM",
    ),
)


def _away(ranks: Sequence[RankStatus], ways: Sequence[_Way]) -> str:
    for is_away, what in ways:
        if away := [one for one in ranks if is_away(one)]:
            return _sentence(away, what, "").text
    return ""


def verdict(ranks: Sequence[RankStatus], limits: Limits) -> Verdict:
    """Return why a run with these ranks cannot continue, and what each rank is doing."""
    there = [one for one in ranks if one.state != "gone"]
    patience = max((one.heartbeat.allowed for one in there if one.heartbeat), default=0.0)
    limits = limits.longer_by(patience)
    for held_up in (_stopped, _lost, _left, _awaited, _apart, _idle, _over):
        if found := held_up(ranks, there, limits):
            several = len(ranks) > 1
            return replace(found, text=f"{found.text}\n{picture(ranks)}") if several else found
    return Verdict()


def _stopped(ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits) -> Verdict:
    return _frozen([one for one in there if one.held >= limits.still])


def _frozen(ranks: Sequence[RankStatus]) -> Verdict:
    # Even if only just stopped: when nothing moves, a stopped rank is what the others wait for.
    return _sentence(
        [one for one in ranks if one.state == "stopped"],
        "stopped (SIGSTOP), and the others are waiting for THEM",
        "by a debugger, Ctrl-Z or `kill -STOP`?",
    )


def _lost(ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits) -> Verdict:
    found = [
        one
        for one in ranks
        # Programs other than Python scripts do not report their end.
        if one.state == "gone" and one.heartbeat and not one.has_ended and one.held >= limits.still
    ]
    if not any(not one.has_ended for one in there):
        return Verdict()
    return _sentence(
        found,
        "gone before the end of the script (os._exit? out of memory?) while others are still running",
        "",
    )


def _left(ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits) -> Verdict:
    # In waits other than init, Horovod itself detects the end of a rank.
    waiting = any(_meeting(one) == INIT and one.idle >= limits.still for one in there)
    ended = [one for one in ranks if one.has_ended]
    if limits.elastic or not waiting:
        return Verdict()
    return _sentence(
        ended, f"missing: the script has ended there, but others are waiting for THEM in {INIT}", ""
    )


def _awaited(ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits) -> Verdict:
    # Collectives are left to Horovod's stall check; a rank may wait in join for good reason.
    late = [one for one in there if not (one.heartbeat and one.heartbeat.waiting)]
    late = [one for one in late if not one.has_ended]
    # Ranks that compute may be busy for long, for example with imports or reading data.
    stuck = all(
        one.quiet >= limits.waiting or (one.phase in WITH_BEATS and one.idle >= limits.hang)
        for one in late
    )
    limit = limits.waiting if stuck else limits.busy
    waiting = [one for one in there if one.heartbeat and one.heartbeat.waiting]
    waiting = [one for one in waiting if one.idle >= limit]
    if late and any(_meeting(one) == INIT for one in waiting):
        missing = f"missing: others have waited {limit:g} s for THEM in {INIT}"
        if limits.elastic:
            # The waiting ranks may have hit another failure, while this one is still working.
            late = [one for one in late if one.idle >= limit]
        return _frozen(late) or _sentence(late, missing, "")
    if limits.elastic:
        # The ranks may be waiting until there are as many hosts as the job needs.
        limit = limits.hang
        waiting = [one for one in waiting if one.idle >= limit]
    if waiting and len(waiting) == len(there):
        where = " and ".join(sorted({_meeting(one) for one in waiting}))
        unseen = sorted(set(range(max(one.size for one in ranks))) - {one.rank for one in ranks})
        if unseen and not limits.elastic:
            have = "has" if len(unseen) == 1 else "have"
            return Verdict(
                f"{ranks_in_words(unseen)} {have} not started (or ended at once), and the others have waited "
                f"{limit:g} s in {where}: check the hosts where no worker has started"
            )
        waited = (
            f"all workers have waited for {limit:g} s in {where}: can the hosts reach each other?"
        )
        return _frozen(there) or Verdict(waited)
    return Verdict()


def _apart(ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits) -> Verdict:
    """Find the ranks that are missing from a step or collective in which the others wait."""
    limit = limits.apart
    late = [one for one in there if not (one.has_ended or _meets_others(one))]
    others = [one for one in there if _meets_others(one)]
    hang = all(
        one.idle >= limit and (one.phase in WITH_BEATS or one.quiet >= limit) for one in late
    )
    if not (others and hang and all(one.idle >= limit for one in others)):
        return Verdict()
    if not late:
        return _frozen(others) or _mismatch(others, limit)
    where = " and ".join(sorted({_meeting(one) or one.phase for one in others}))
    missing = f"missing: others have waited {limit:g} s for THEM in {where}"
    return _frozen(late) or _sentence(late, missing, "")


def _mismatch(ranks: Sequence[RankStatus], seconds: float) -> Verdict:
    """Report ranks that all wait, but in different collectives, none of which can complete."""
    collectives = set(map(_meeting, ranks))
    if len(collectives) < 2 or "" in collectives:
        return Verdict()
    return Verdict(
        f"the ranks have waited {seconds:g} s for each other in different collectives: all ranks must call "
        "the same collectives with the same names"
    )


def _idle(ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits) -> Verdict:
    if not there:
        return Verdict()
    if all(one.phase in WITH_BEATS and one.idle >= limits.hang for one in there):
        idle = f"no worker has made progress for {limits.hang:g} s (--hang-timeout)"
        return _frozen(there) or Verdict(idle)
    # Later, Horovod's own threads compute all the time.
    if all(one.phase == "starting" and one.quiet >= limits.busy for one in there):
        idle = f"no worker has called hvdtrain.init() or computed for {limits.busy:g} s (--hang-timeout)"
        return _frozen(there) or Verdict(idle)
    return Verdict()


def _over(ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits) -> Verdict:
    # Processes left running by the scripts may still compute.
    ended = all(
        (one.held if one.state == "gone" else one.quiet if one.has_ended else 0.0) >= limits.busy
        for one in ranks
    )
    if not ranks or not ended:
        return Verdict()
    return Verdict(f"all workers finished, but the run did not end within {limits.busy:g} s")


def _sentence(found: Sequence[RankStatus], what: str, advice: str) -> Verdict:
    if not found:
        return Verdict()
    names = ", ".join(_name(one) for one in found)
    is_, it = ("is", "it") if len(found) == 1 else ("are", "them")
    text = f"{names} {is_} {what.replace('THEM', it)}" + (f": {advice}" if advice else "")
    return Verdict(text, tuple(found))


def _name(one: RankStatus) -> str:
    place = f" on host {one.host}" if one.host else ""
    return f"rank {one.rank}{place} (process {one.pid})"


def _meeting(one: RankStatus) -> str:
    """Return where a rank waits for others. Empty if it does not."""
    if one.heartbeat is None or not one.heartbeat.waiting:
        return ""
    return f"the collective {one.heartbeat.detail}" if one.heartbeat.detail else INIT


def _meets_others(one: RankStatus) -> bool:
    """Return whether a rank is in a collective, or in a step, whose collectives are not visible."""
    if one.heartbeat is not None and one.heartbeat.waiting:
        return one.heartbeat.detail != "join"
    return one.phase in ("training", "evaluating", "predicting")


def picture(ranks: Sequence[RankStatus]) -> str:
    """Describe where the ranks are and in which state, one line per group of ranks that do the same."""
    found: dict[str, list[int]] = {}
    for one in sorted(ranks, key=lambda status: status.rank):
        found.setdefault(_line(one), []).append(one.rank)
    return "\n".join(f"  {ranks_in_words(numbers)}: {words}" for words, numbers in found.items())


def _line(one: RankStatus) -> str:
    state = "" if one.state == "running" else f", {one.state}"
    place = one.heartbeat.place if one.heartbeat else "a program other than Python"
    return f"in {place}{state}"
