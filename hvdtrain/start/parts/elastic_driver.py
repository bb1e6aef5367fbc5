"""Horovod's driver of an elastic job, which starts a failed rank again in its place.

Horovod's own gives up the whole host of a rank that fails: it ends the ranks there that are well, and a job on one host
with them. Here a host is left out only when its ranks fail again and again.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.common.util.timeout import TimeoutException
from horovod.runner.elastic.constants import RESET_LIMIT_EXCEEDED_MESSAGE
from horovod.runner.elastic.discovery import DiscoveredHosts, HostManager
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.registration import FAILURE, READY, SUCCESS, WorkerStateRegistry
from horovod.runner.elastic.worker import HostUpdateResult

from hvdtrain.start.parts.output_tags import CurrentRank
from hvdtrain.start.parts.rendezvous import say

MOST_FAILURES = 3
"""In a row on one host."""
IN_A_ROW_SECONDS = 600.0
"""Between two failures that have the same cause: a rank may need minutes to come to where it fails."""


class PatientHosts(HostManager):
    """Horovod's list of the job's hosts; one failure leaves no host out."""

    def blacklist(self, host: str) -> None:
        """Horovod's for each failure: `PatientDriver.resume` decides."""

    def leave_out(self, host: str) -> None:
        """End the ranks of the host; it is used again after the cooldown."""
        super().blacklist(host)


class PatientRegistry(WorkerStateRegistry):
    """Horovod's record of how the ranks of a round ended."""

    def _on_workers_recorded(self) -> None:
        """Horovod's, which ends the job when a rank has ended with 0. While others wait to go on, that rank left early
        (os._exit), or will find when it is started again that nothing is left to do.
        """
        if READY in self._states.values():
            for host, slot in sorted(self.get(SUCCESS)):
                say(
                    f"local rank {slot} of host {host} ended with exit code 0, while others continue"
                )
                self._states[host, slot] = FAILURE
                self._workers[FAILURE].add((host, slot))
            self._workers[SUCCESS].clear()
        super()._on_workers_recorded()


class PatientDriver(ElasticDriver):
    """Horovod's, whose ranks are started again where they failed."""

    _host_assignments: dict[str, list[SlotInfo]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._failed_at: defaultdict[str, list[float]] = defaultdict(list)
        super().__init__(*args, **kwargs)

    def start(self, num_proc: int, create_worker_fn: Callable[..., Any]) -> None:
        """Horovod's, whose workers' output is marked with the rank that they have when they write it."""

        def create(slot: SlotInfo, events: list[Any]) -> Any:
            def now() -> int:
                current: int = self.get_slot_info(slot.hostname, slot.local_rank).rank
                return current

            return create_worker_fn(replace(slot, rank=CurrentRank(slot.rank, now)), events)

        super().start(num_proc, create)

    def stop(self, error_message: str | None = None) -> None:
        """Horovod's, which keeps the reason to itself."""
        if error_message:
            _, reset, limit = error_message.partition(RESET_LIMIT_EXCEEDED_MESSAGE.format(""))
            told = f"--reset-limit {limit} allows no more restarts"
            say(f"the job ends: {told if reset else error_message}")
        super().stop(error_message)

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> DiscoveredHosts:
        """Horovod's, with a message that tells what was waited for."""
        try:
            return super().wait_for_available_slots(min_num_proc, min_hosts)
        except TimeoutException:
            found = self._host_manager.current_hosts.count_available_slots()
            say(
                f"the job ends: it needs {min_num_proc} slots, but had only {found} in the last {self._timeout} "
                "seconds (--elastic-timeout)"
            )
            raise

    def register_worker_server(
        self, host: str, slot: int, addresses: Any, secret_key: bytes
    ) -> None:
        """Horovod's. A worker that listens from now on is told of the hosts that have come or gone before."""
        super().register_worker_server(host, slot, addresses, secret_key)
        first = self.get_coordinator_info()
        if first is not None and (first.hostname, first.local_rank) == (host, slot):
            self._notify_workers_host_changes(
                self._host_manager.current_hosts, HostUpdateResult.mixed
            )

    def resume(self) -> None:
        """After a failure, or when hosts have come or gone: start the ranks that are missing."""
        failed = self._failed()
        for host in sorted({host for host, _ in failed}):
            if self._keeps_failing(host):
                say(f"host {host} is left out: ranks failed there {MOST_FAILURES} times in a row")
                self._host_manager.leave_out(host)
        if all(map(self._host_manager.is_blacklisted, self._host_assignments)):
            self.stop("no hosts are left for the ranks")
            return
        super().resume()

    def _failed(self) -> set[tuple[str, int]]:
        """(host, local rank) of those that have failed since the number of ranks changed last."""
        return set(self._worker_registry.get(FAILURE))

    def _keeps_failing(self, host: str) -> bool:
        now = time.monotonic()
        earlier = self._failed_at[host]
        if earlier and now - earlier[-1] > IN_A_ROW_SECONDS:
            earlier.clear()
        earlier.append(now)
        return len(earlier) >= MOST_FAILURES

    def _update_host_assignments(self, current_hosts: DiscoveredHosts) -> list[SlotInfo]:
        failed = self._failed()
        living = {
            host: [one for one in slots if (host, one.local_rank) not in failed]
            for host, slots in self._host_assignments.items()
        }
        self._host_assignments = {host: slots for host, slots in living.items() if slots}
        pending: list[SlotInfo] = super()._update_host_assignments(current_hosts)
        for host, slot in sorted(failed & {(one.hostname, one.local_rank) for one in pending}):
            say(f"local rank {slot} of host {host} failed and is being restarted")
        return pending

    def _get_host_assignments(
        self, current_hosts: DiscoveredHosts
    ) -> tuple[dict[str, list[SlotInfo]], list[SlotInfo]]:
        """Horovod's, with the ranks that live before new ones: rank 0 gives all others the state of the training."""
        ranks = {
            (host, one.local_rank): one.rank
            for host, slots in self._host_assignments.items()
            for one in slots
        }
        oldest = {
            host: min(one.rank for one in slots) for host, slots in self._host_assignments.items()
        }
        order = sorted(
            current_hosts.host_assignment_order, key=lambda host: oldest.get(host, math.inf)
        )
        assignments, _ = super()._get_host_assignments(
            DiscoveredHosts(current_hosts.host_slots, order)
        )
        for host, slots in assignments.items():
            by_age = sorted(slots, key=lambda one: ranks.get((host, one.local_rank), math.inf))
            numbers = {one.local_rank: same.rank for one, same in zip(by_age, slots, strict=True)}
            assignments[host] = [replace(one, rank=numbers[one.local_rank]) for one in slots]
        everywhere = [one for slots in assignments.values() for one in slots]
        return assignments, sorted(everywhere, key=lambda one: one.rank)
