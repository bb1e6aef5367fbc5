"""Decides from what the ranks do whether their run can still go on, and who is in its way. Pure but for its memory.

Horovod's own stall check runs inside rank 0. It sees a rank that does not come to a collective, and no rank that is
frozen, never called init or has gone: over MPI it waits for such a rank itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdtrain.environment import HANG_SECONDS, STOPPED_SECONDS
from hvdtrain.launch.running.process_names import ranks_in_words
from hvdtrain.launch.running.rank_monitor import RankStatus
from hvdtrain.launch.running.stopped_programs import StoppedProgram
from hvdtrain.worker.heartbeat import INIT, WITH_BEATS

STILL_SECONDS = 20.0
"""A rank that is stopped, or has gone without an end. Shorter than Gloo's 30 s, after which it blames others."""
WAITING_SECONDS = 300.0
"""Ranks wait, and others do not come: for instance to init."""
UNHEARD_SECONDS = 60.0
"""Nothing is told of a rank: at least so long, even with a short `--hang-timeout`; on slow networks news come late."""
PAUSE_SECONDS = 5.0
"""Without being asked: the launcher has waited for a reader of its output (Ctrl-S in a terminal), and so have ranks."""
PROGRESS_SECONDS = 60.0
"""Of work after init count as progress in a script whose steps are not seen."""


@dataclass(frozen=True)
class Limits:
    """Seconds; see the constants of this module. busy: as waiting, while those that do not come compute."""

    still: float = STILL_SECONDS
    waiting: float = WAITING_SECONDS
    busy: float = HANG_SECONDS
    hang: float = HANG_SECONDS


def stopped_seconds(environ: Mapping[str, str]) -> float:
    """Seconds after which a stopped process counts, as `hvdtrain run` tells the programs that it starts."""
    return float(environ.get(STOPPED_SECONDS, STILL_SECONDS))


def limits_of(hang: float) -> Limits:
    """None is longer than the user's `--hang-timeout`, but for ranks that compute while others wait for them."""
    return Limits(
        still=min(STILL_SECONDS, hang),
        waiting=min(WAITING_SECONDS, hang),
        busy=max(WAITING_SECONDS, hang),
        hang=hang,
    )


@dataclass
class Watchdog:
    """What is known of a launch's ranks.

    Attributes:
        limits: of the ranks; None: others look after them, or nobody.
        still: seconds after which a stopped program that looks after the ranks counts.
        statuses: of each rank that was ever seen, the last one; of each number that is given away, the new one's.
        steps: the most that a rank has finished in an epoch.
        working_since: when the first rank was past init (time.monotonic()); 0 before.
    """

    limits: Limits | None
    still: float = float("inf")
    statuses: dict[int, RankStatus] = field(default_factory=dict)
    steps: int = 0
    working_since: float = 0.0
    _heard: dict[int, float] = field(default_factory=dict)
    _numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    _hosts: dict[str, float] = field(default_factory=dict)
    _asked: float = float("inf")
    _resumed: float = float("-inf")

    def hear(self, statuses: Iterable[RankStatus]) -> None:
        """The ranks of a host, now."""
        for one in statuses:
            self._renumber(one)
            before = self.statuses.get(one.rank)
            if before and before.state != "gone" and one.state == "gone":
                # What is killed while it is stopped was stopped; and a number that another has now is not gone.
                stays = before.state == "stopped" or _process(before) != _process(one)
                one = before if stays else one
            self.statuses[one.rank] = one
            self._heard[one.rank] = time.monotonic()
            if one.heartbeat is not None and one.phase not in ("starting", "init"):
                self.working_since = self.working_since or time.monotonic()
                self.steps = max(self.steps, one.heartbeat.step)

    def _renumber(self, one: RankStatus) -> None:
        """In an elastic job a process may have another number than before."""
        earlier = self._numbers.get(_process(one), one.rank)
        self._numbers[_process(one)] = one.rank
        before = self.statuses.get(earlier)
        if earlier != one.rank and before and _process(before) == _process(one):
            del self.statuses[earlier]

    def hear_host(self, name: str) -> None:
        """Something was told of a host, of ranks there or that there are none yet."""
        self._hosts[name] = time.monotonic()

    def verdict(self, programs: Iterable[StoppedProgram] = ()) -> str:
        """Why the run cannot go on; empty as long as it can.

        Args:
            programs: those that look after the ranks and are stopped.
        """
        now = time.monotonic()
        if now - self._asked > PAUSE_SECONDS:
            self._resumed = now
        self._asked = now
        awake = now - self._resumed
        late = (str(one) for one in programs if min(awake, one.held) >= self.still)
        return self._of_ranks(now, awake) or next(late, "")

    def _of_ranks(self, now: float, awake: float) -> str:
        if self.limits is None:
            return ""
        ranks = [_at_most(awake, one) for one in self.statuses.values()]
        return self._unheard(now, awake, self.limits) or verdict(ranks, self.limits)

    def _unheard(self, now: float, awake: float, limits: Limits) -> str:
        """Their hosts tell of ranks every few seconds, whatever these do."""
        limit = max(limits.waiting, UNHEARD_SECONDS)
        there = (one for one in self.statuses.values() if one.state != "gone")
        heard = {f"host {name}": at for name, at in self._hosts.items()} | {
            _name(one): self._heard[one.rank] for one in there if one.host not in self._hosts
        }
        found = [name for name, at in heard.items() if min(awake, now - at) >= limit]
        if not found:
            return ""
        return (
            f"no news from {', '.join(found)} for {limit:g} s: "
            "have hvdtrain's processes there been stopped (`ps -eo pid,stat,args`)?"
        )

    def progress(self) -> str:
        """What the ranks have done, as far as it is known; empty if they finished no step and worked for no minute."""
        if self.steps > 0:
            return f"{self.steps} step{'s' if self.steps > 1 else ''}"
        worked = time.monotonic() - self.working_since if self.working_since else 0.0
        return f"{worked:.0f} s of work" if worked >= PROGRESS_SECONDS else ""

    def absent(self, failed: Container[int]) -> str:
        """Which ranks, other than those that `failed`, these have missed; empty if none is known.

        For a run that has ended: what has gone meanwhile may have been ended with it, so that counts least.
        """
        others = [one for one in self.statuses.values() if one.rank not in failed]
        for is_away, what in _AWAY:
            if away := [one for one in others if is_away(one)]:
                return _sentence(away, what, "")
        return ""


def _process(one: RankStatus) -> tuple[str, int]:
    return one.host, one.pid


def _at_most(seconds: float, one: RankStatus) -> RankStatus:
    """The rank as if it had been watched for so long."""
    held, idle, quiet = (min(seconds, since) for since in (one.held, one.idle, one.quiet))
    return replace(one, held=held, idle=idle, quiet=quiet)


_AWAY: tuple[tuple[Callable[[RankStatus], bool], str], ...] = (
    (lambda one: one.state == "stopped", "stopped (SIGSTOP) while others waited for THEM"),
    (
        lambda one: one.phase == "starting",
        "missing: hvdtrain.init() was not called while others waited for THEM",
    ),
    (
        lambda one: one.has_ended,
        "missing: the script has ended there while others still need THEM",
    ),
    (
        lambda one: one.state == "gone",
        "gone before the end of the script (os._exit?) while others need THEM",
    ),
)


def verdict(ranks: Sequence[RankStatus], limits: Limits) -> str:
    """Why a run with these ranks cannot go on, and what each of them does; empty as long as it can."""
    there = [one for one in ranks if one.state != "gone"]
    patience = max((one.heartbeat.allowed for one in there if one.heartbeat), default=0.0)
    for held_up in (_stopped, _lost, _awaited, _idle, _over):
        if reason := held_up(ranks, there, limits, patience):
            return f"{reason}\n{picture(ranks)}" if len(ranks) > 1 else reason
    return ""


def _stopped(
    ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits, patience: float
) -> str:
    return _frozen([one for one in there if one.held >= limits.still])


def _frozen(ranks: Sequence[RankStatus]) -> str:
    # However short: a rank that is stopped while nothing moves is what the others wait for.
    return _sentence(
        [one for one in ranks if one.state == "stopped"],
        "stopped (SIGSTOP), and the others wait for THEM",
        "was it a debugger, Ctrl-Z or `kill -STOP`?",
    )


def _lost(
    ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits, patience: float
) -> str:
    found = [
        one
        for one in ranks
        # What is no Python script does not tell its end.
        if one.state == "gone" and one.heartbeat and not one.has_ended and one.held >= limits.still
    ]
    if not any(not one.has_ended for one in there):
        return ""
    return _sentence(
        found,
        "gone before the end of the script (os._exit? out of memory?) while others run on "
        "without THEM",
        "",
    )


def _awaited(
    ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits, patience: float
) -> str:
    # To collectives Horovod's stall check looks; a rank in join may wait for good reason.
    late = [one for one in there if not (one.heartbeat and one.heartbeat.waiting)]
    late = [one for one in late if not one.has_ended]
    # Who computes may do what takes long: imports, a data set.
    idle = all(one.quiet >= limits.waiting + patience for one in late)
    limit = (limits.waiting if idle else limits.busy) + patience
    waiting = [one for one in there if one.heartbeat and one.heartbeat.waiting]
    waiting = [one for one in waiting if one.idle >= limit]
    if late and any(_meeting(one) == INIT for one in waiting):
        missing = f"missing: others have waited {limit:g} s for THEM in {INIT}"
        return _frozen(late) or _sentence(late, missing, "")
    if waiting and len(waiting) == len(there):
        where = " and ".join(sorted({_meeting(one) for one in waiting}))
        unseen = sorted(set(range(max(one.size for one in ranks))) - {one.rank for one in ranks})
        if unseen:
            have = "has" if len(unseen) == 1 else "have"
            return (
                f"{ranks_in_words(unseen)} {have} not started, and for {limit:g} s the others have waited in {where}: "
                "check the hosts where no rank has started"
            )
        return (
            _frozen(there)
            or f"all ranks have waited for {limit:g} s in {where}: can the hosts reach each other?"
        )
    return ""


def _idle(
    ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits, patience: float
) -> str:
    if not there or not all(
        one.phase in WITH_BEATS and one.idle >= limits.hang + patience for one in there
    ):
        return ""
    return (
        _frozen(there)
        or f"no rank has made progress for {limits.hang + patience:g} s (--hang-timeout)"
    )


def _over(
    ranks: Sequence[RankStatus], there: Sequence[RankStatus], limits: Limits, patience: float
) -> str:
    # What the scripts have left running may compute.
    ended = all(
        (one.held if one.state == "gone" else one.quiet if one.has_ended else 0.0) >= limits.busy
        for one in ranks
    )
    if not ranks or not ended:
        return ""
    return f"all ranks finished, but the run did not end within {limits.busy:g} s"


def _sentence(found: Sequence[RankStatus], what: str, advice: str) -> str:
    if not found:
        return ""
    names = ", ".join(_name(one) for one in found)
    is_, it = ("is", "it") if len(found) == 1 else ("are", "them")
    return f"{names} {is_} {what.replace('THEM', it)}" + (f": {advice}" if advice else "")


def _name(one: RankStatus) -> str:
    place = f" on host {one.host}" if one.host else ""
    return f"rank {one.rank}{place} (process {one.pid})"


def _meeting(one: RankStatus) -> str:
    """Where it waits for others; empty if it does not."""
    if one.heartbeat is None or not one.heartbeat.waiting:
        return ""
    return f"the collective {one.heartbeat.detail}" if one.heartbeat.detail else INIT


def picture(ranks: Sequence[RankStatus]) -> str:
    """A line for all ranks that do the same: where they are, in which state."""
    return "\n".join(
        f"  {ranks_in_words(numbers)}: {words}" for words, numbers in _grouped(ranks, _line).items()
    )


def _line(one: RankStatus) -> str:
    state = "" if one.state == "running" else f", {one.state}"
    place = one.heartbeat.place if one.heartbeat else "a program without a heartbeat"
    return f"in {place}{state}"


def _grouped(ranks: Sequence[RankStatus], key: Callable[[RankStatus], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in sorted(ranks, key=lambda status: status.rank):
        found.setdefault(key(one), []).append(one.rank)
    return found
