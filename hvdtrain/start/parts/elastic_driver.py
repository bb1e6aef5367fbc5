"""Horovod's driver of an elastic job, changed to restart a failed rank in its place.

Horovod's own driver drops the whole host of a failed rank: it ends the healthy ranks there, and with them any job on a
single host. This one skips a host only if its ranks fail repeatedly.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, SlotInfo
from horovod.runner.common.util.timeout import TimeoutException
from horovod.runner.elastic.constants import RESET_LIMIT_EXCEEDED_MESSAGE
from horovod.runner.elastic.discovery import DiscoveredHosts, HostManager
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.registration import FAILURE, READY, SUCCESS, WorkerStateRegistry
from horovod.runner.elastic.worker import HostUpdateResult

from hvdtrain.errors import EngineError
from hvdtrain.start.parts.output_tags import CurrentRank, say
from hvdtrain.worker.elastic_place import ON_DISK

MOST_FAILURES = 3
"""Maximum failures in a row on one host, without progress (a new state from which training can resume) in between."""
IN_A_ROW_SECONDS = 600.0
"""Maximum time between failures in a row, as a rank may take minutes to reach the point where it fails."""
POLL_SECONDS = 0.05


class PatientHosts(HostManager):
    """Horovod's list of the job's hosts, but a single failure does not exclude a host."""

    def blacklist(self, host: str) -> None:
        """Do nothing. Horovod calls this on each failure; here, `PatientDriver.resume` decides."""

    def leave_out(self, host: str) -> None:
        """Exclude a host and end its ranks. It is used again after the cooldown."""
        super().blacklist(host)


class PatientRegistry(WorkerStateRegistry):
    """Horovod's registry of how the ranks of a round ended."""

    def record_ready(self, host: str, slot: int) -> None:
        """Override: ignore a rank that has failed. Its request may arrive late, and would count for its replacement."""
        if (host, slot) not in self.get(FAILURE):
            super().record_ready(host, slot)

    def has_ended(self) -> bool:
        """Return whether any rank of this round has ended."""
        return self.count(FAILURE) + self.count(SUCCESS) > 0

    def _on_workers_recorded(self) -> None:
        """Override: Horovod's ends the job when a rank has exited with 0. If others wait to continue, that rank left
        early (os._exit), or will find after its restart that nothing is left to do.
        """
        if READY in self._states.values():
            for host, slot in sorted(self.get(SUCCESS)):
                say(
                    f"local rank {slot} of host {host} ended with exit code 0, while others continue"
                )
                self._states[host, slot] = FAILURE
                self._workers[FAILURE].add((host, slot))
            self._workers[SUCCESS].clear()
        if self.count(FAILURE) == self._size and self._driver.has_checkpoint:
            # Until the next round, so that Horovod does not end the job because all ranks have failed.
            self._size += 1
        super()._on_workers_recorded()


class PatientDriver(ElasticDriver):
    """Horovod's elastic driver, but failed ranks are restarted in their place.

    Attributes:
        has_checkpoint: Whether training can resume even if no rank is alive.
    """

    _host_assignments: dict[str, list[SlotInfo]]
    _worker_registry: PatientRegistry

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._failed_at: defaultdict[str, list[float]] = defaultdict(list)
        self._saved_at = float("-inf")
        self.has_checkpoint = False
        self._arriving = threading.Lock()
        self._arrived: set[tuple[str, int]] = set()
        self._round = self._complete_round = 0
        self._have_state: set[tuple[str, int]] = set()
        self._running: dict[tuple[str, int], SlotInfo] = {}  # As they were started.
        super().__init__(*args, **kwargs)

    def note_saved(self, where: str) -> None:
        """Record that the ranks have saved a new state, which counts as progress."""
        self._saved_at = time.monotonic()
        self.has_checkpoint = self.has_checkpoint or where == ON_DISK

    def next_place(self, host: str, slot: int) -> SlotInfo:
        """Return a rank's assignment for the next round, once all other ranks of this one are ready or have failed."""
        try:
            self.record_ready(host, slot)
        except RuntimeError:
            return INVALID_SLOT_INFO  # It has failed meanwhile, and nobody reads the answer.
        return self.get_slot_info(host, slot)

    def arrive(self, host: str, slot: int) -> SlotInfo:
        """Return a rank's assignment in this round, once all ranks of the round are about to start Horovod.

        If a rank fails before that, a new round begins, because Horovod would abort all ranks during its start.
        """
        place = (host, slot)
        while self.has_rank_assignment(host, slot) and not self.finished():
            with self._arriving:
                if self._round != self._worker_registry.last_rendezvous():
                    self._round = self._worker_registry.last_rendezvous()
                    self._arrived = set()
                number, came_back = self._round, place in self._arrived
                self._arrived.add(place)
                if (
                    len(self._arrived) >= self.world_size()
                    and not self._worker_registry.has_ended()
                ):
                    self._complete_round = number
                    self._have_state = set(self._arrived)
            while not came_back and not self._failed():
                if number != self._worker_registry.last_rendezvous() or self.finished():
                    return INVALID_SLOT_INFO  # This rank has ended without a report.
                # In a complete round, a rank that ended with 0 had nothing more to do: the others end likewise.
                if number == self._complete_round:
                    return self.get_slot_info(host, slot)
                if self._worker_registry.has_ended():
                    break
                time.sleep(POLL_SECONDS)
            if place in self._failed() or self.next_place(host, slot) is INVALID_SLOT_INFO:
                break
        return INVALID_SLOT_INFO

    def has_arrived(self, host: str, slot: int) -> bool:
        """Return whether the rank has asked for its assignment by `arrive` in this round."""
        current = self._round == self._worker_registry.last_rendezvous()
        return current and (host, slot) in self._arrived

    def start(self, num_proc: int, create_worker_fn: Callable[..., Any]) -> None:
        """Override: mark the output of workers with the rank that they have at the time of writing."""

        def create(slot: SlotInfo, events: list[Any]) -> Any:
            def now() -> int:
                current: int = self.get_slot_info(slot.hostname, slot.local_rank).rank
                return current

            return create_worker_fn(replace(slot, rank=CurrentRank(slot.rank, now)), events)

        super().start(num_proc, create)

    def stop(self, error_message: str | None = None) -> None:
        """Override: print the reason, which Horovod does not."""
        if error_message:
            _, reset, limit = error_message.partition(RESET_LIMIT_EXCEEDED_MESSAGE.format(""))
            told = f"the number of restarts has reached --reset-limit ({limit})"
            say(f"the job ends: {told if reset else error_message}")
        super().stop(error_message)

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> DiscoveredHosts:
        """Override: raise EngineError with the slots needed and found, instead of Horovod's timeout."""
        try:
            return super().wait_for_available_slots(min_num_proc, min_hosts)
        except TimeoutException:
            found = self._host_manager.current_hosts.count_available_slots()
            raise EngineError(
                f"the job needs {min_num_proc} slots, but had only {found} in the last {self._timeout} seconds "
                "(--elastic-timeout)"
            ) from None

    def register_worker_server(
        self, host: str, slot: int, addresses: Any, secret_key: bytes
    ) -> None:
        """Override: notify a worker that starts to listen of earlier changes of hosts."""
        super().register_worker_server(host, slot, addresses, secret_key)
        first = self.get_coordinator_info()
        if first is not None and (first.hostname, first.local_rank) == (host, slot):
            self.tell_changes()

    def tell_changes(self) -> None:
        """Notify rank 0 if the hosts are no longer those of this round."""
        self._notify_workers_host_changes(self._host_manager.current_hosts, HostUpdateResult.mixed)

    def resume(self) -> None:
        """Start missing ranks after a failure, or when hosts have joined or left."""
        failed = self._failed()
        for host in sorted({host for host, _ in failed}):
            if self._keeps_failing(host):
                say(f"host {host} is skipped: workers failed there {MOST_FAILURES} times in a row")
                self._host_manager.leave_out(host)
        if all(map(self._host_manager.is_blacklisted, self._host_assignments)):
            self.stop("no hosts are left for the workers")
            return
        had_state = self._have_state
        self._have_state = {
            (host, slot)
            for host, slot in had_state - failed
            if not self._host_manager.is_blacklisted(host)
        }
        if had_state and not self._have_state:
            # New ranks alone would silently start from scratch.
            if not self.has_checkpoint:
                self.stop("no worker with the state of the training is left")
                return
            say(
                "none of the workers that were training is left: the job continues from the newest "
                "checkpoint"
            )
        try:
            super().resume()
        except EngineError as error:
            self.stop(str(error))

    def _failed(self) -> set[tuple[str, int]]:
        """Return (host, local rank) of the ranks that have failed in this round."""
        return set(self._worker_registry.get(FAILURE))

    def _keeps_failing(self, host: str) -> bool:
        now = time.monotonic()
        earlier = self._failed_at[host]
        if earlier and (now - earlier[-1] > IN_A_ROW_SECONDS or self._saved_at > earlier[-1]):
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
        pending: list[SlotInfo] = super()._update_host_assignments(self._with_state(current_hosts))
        to_start = {(one.hostname, one.local_rank) for one in pending}
        self._running = {
            place: process
            for place, process in self._running.items()
            if self.has_rank_assignment(*place) and place not in to_start
        }
        for host, slot in sorted(failed & to_start):
            say(f"local rank {slot} of host {host} failed and is being restarted")
        return pending

    def _with_state(self, hosts: DiscoveredHosts) -> DiscoveredHosts:
        """Return the hosts, with a withdrawn slot if only ranks on such slots have the state of the training.

        That rank sends the state to the others in this round, and leaves in the next one.
        """
        slots = hosts.host_slots
        kept = [(host, slot) for host, slot in sorted(self._have_state) if host in slots]
        if not kept or any(slot < slots[host] for host, slot in kept):
            return hosts
        host, slot = kept[0]
        return DiscoveredHosts({**slots, host: slot + 1}, hosts.host_assignment_order)

    def _start_worker_process(self, slot_info: SlotInfo) -> None:
        self._running[slot_info.hostname, slot_info.local_rank] = slot_info
        super()._start_worker_process(slot_info)

    def _handle_worker_exit(self, slot_info: SlotInfo, exit_code: int, timestamp: float) -> None:
        """Override: ignore a rank that has left the job, even if another one has been started in its place."""
        if self._running.get((slot_info.hostname, slot_info.local_rank)) is slot_info:
            super()._handle_worker_exit(slot_info, exit_code, timestamp)

    def _get_host_assignments(
        self, current_hosts: DiscoveredHosts
    ) -> tuple[dict[str, list[SlotInfo]], list[SlotInfo]]:
        """Override: number surviving ranks before new ones, as rank 0 sends the training state to all others."""
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
