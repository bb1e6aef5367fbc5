"""The hosts of an elastic job, which join and leave. Each is checked before use, like the hosts of any other job.

Horovod starts workers on whatever the discovery script prints. An unreachable host then looks like a worker that
failed, and the whole job is reset. Here, a host is used from the report of its agent (see `agents`) until that agent
ends. A problem is printed once, and the host is retried after a while.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from hvdtrain.errors import EngineError, HvdtrainError
from hvdtrain.launch.addresses import interface_towards
from hvdtrain.launch.host_report import (
    NO_COMMON_INTERFACE,
    HostReport,
    common_interface,
    loopback_interfaces,
    missing_interfaces,
)
from hvdtrain.launch.hosts import is_host_name
from hvdtrain.launch.running.line_splitter import LONGEST_NEWS, Lines
from hvdtrain.start.parts.agents import Agents, News, SshSettings, agent_argv, greet
from hvdtrain.start.parts.horovod_patches import network
from hvdtrain.start.parts.host_agent import Greeting, own_report
from hvdtrain.start.parts.news_pipe import NewsPipe
from hvdtrain.start.parts.output_tags import say

AGAIN_SECONDS = 30.0
"""Interval at which a skipped host is retried."""
TICK_SECONDS = 1.0
_NEWS = ("ranks", "stopped", "left")
"""What the agents report to the supervisor. It does not wait for what scripts left behind, which the agents end."""


class Discovery(Protocol):
    """Interface of Horovod's host discovery."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each host that is available now."""
        ...


class ElasticAgents(Agents):
    """Proxy for the agents in the supervisor's process: forwards orders to `ElasticHosts`, and the news from there."""

    def __init__(self, launch_id: str, reach: SshSettings) -> None:
        super().__init__({}, {})
        self.launch_id = launch_id
        self.reach = reach
        self.orders, self._orders = os.pipe()
        self._told, telling = os.pipe()
        for descriptor in (self._told, telling):
            os.set_blocking(descriptor, False)
        self._telling = NewsPipe(telling)
        self._split = Lines(longest=LONGEST_NEWS)

    def order(self, host: str, **order: Any) -> None:
        """Send an order to one agent, if it is still there."""
        self.order_all(to=host, **order)

    def order_all(self, **order: Any) -> None:
        """Send an order to every current agent."""
        os.write(self._orders, json.dumps(order).encode() + b"\n")

    def news(self, seconds: float) -> Iterator[News]:
        """Yield (host, news) for everything reported so far. {"without": true} means that the host has left."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._told, 65536):
                for line in self._split.lines(data):
                    with contextlib.suppress(ValueError):
                        host, news = json.loads(line)
                        yield host, news

    def tell(self, host: str, news: Mapping[str, Any]) -> None:
        """Send news from the launcher's process."""
        self._telling.send([host, news], once=bool(news.keys() & {"without", "left"}))


class ElasticHosts:
    """The hosts that can run ranks of the job, in the launcher's process. Use as a context manager.

    Args:
        stand_in: Proxy that forwards orders to the agents.
        variables: Variables that agents pass to the ranks on other hosts.
        wanted: Network interfaces to use. None finds one.
        seconds: Time limit for the first hosts.
        unfit: Reason why no other host can run ranks of this job; empty if they can.
    """

    def __init__(
        self,
        stand_in: ElasticAgents,
        variables: Mapping[str, str],
        wanted: set[str] | None,
        seconds: float,
        unfit: str = "",
    ) -> None:
        self._unfit = unfit
        self._stand_in = stand_in
        self._variables = variables
        self._wanted = wanted
        self._seconds = seconds
        self._own = own_report()
        self._here: dict[str, bool] = {}
        self._agents: dict[str, Agents] = {}
        self._reports: dict[str, HostReport] = {}
        self._asked: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self._lock = threading.Lock()
        self._first = threading.Event()

    def __enter__(self) -> ElasticHosts:
        for loop in (self._beat, self._pass_orders):
            threading.Thread(target=loop, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            agents, self._agents = list(self._agents.values()), {}
        for one in agents:
            one.end()
        for one in agents:
            one.__exit__()

    def fit(self, found: Mapping[str, int]) -> dict[str, int]:
        """Return the slots of those hosts of `found` that can run ranks now. Waits only for the first hosts."""
        new = [name for name in found if name not in self._here]
        elsewhere = set(network.filter_local_addresses(new)) if new else set()
        self._here = self._here | {name: name not in elsewhere for name in new}
        self._leave([name for name in list(self._agents) if name not in found])
        now = time.monotonic()
        threads = []
        for name in found:
            again = self._asked.get(name, -AGAIN_SECONDS) + AGAIN_SECONDS
            if not self._here[name] and name not in self._agents and now >= again:
                self._asked[name] = now + self._stand_in.reach.seconds
                threads.append(threading.Thread(target=self._ask, args=(name,), daemon=True))
                threads[-1].start()
        if not self._first.is_set():
            for thread in threads:
                thread.join()
            if found:
                self._first.set()
        return {name: n for name, n in found.items() if self._here[name] or name in self._agents}

    def interfaces(self) -> set[str]:
        """Return the network interfaces of the job, chosen from the first hosts.

        Raises:
            EngineError: No hosts were found in time, or they have no common interface.
        """
        if not self._first.wait(self._seconds):
            raise EngineError(f"no hosts were found within {self._seconds:g} s")
        self._wanted = self._wanted or self._common()
        return self._wanted

    def give_up(self) -> None:
        """Stop waiting for the first hosts."""
        self._first.set()

    def _common(self) -> set[str]:
        elsewhere = [name for name, here in self._here.items() if not here]
        if not elsewhere:
            return loopback_interfaces(self._own)
        reports = list(self._reports.values())
        name = common_interface(self._own, reports) if reports else self._towards(elsewhere)
        if not name:
            raise EngineError(NO_COMMON_INTERFACE)
        return {name}

    def _towards(self, hosts: Sequence[str]) -> str:
        """Return the interface of the route to these hosts, none of which has answered yet."""
        for address in filter(None, map(network.resolve_host_address, hosts)):
            with contextlib.suppress(OSError):
                if name := interface_towards(address):
                    return name
        return ""

    def _ask(self, name: str) -> None:
        """Check a host, then add it or report why it is skipped."""
        try:
            if not is_host_name(name):
                raise HvdtrainError(f"{name!r} is not a host name")
            if self._unfit:
                raise HvdtrainError(f"host {name}: {self._unfit}")
            command = agent_argv(name, self._stand_in.launch_id, self._stand_in.reach)
            agents = Agents({name: command}, os.environ)
        except (HvdtrainError, OSError) as error:
            self._leave_out(name, str(error))
            return
        greeting = Greeting(secrets=dict(self._variables))
        answers = greet(agents, {name: greeting}, self._own, reach=self._stand_in.reach)
        problem = answers.problems.get(name, "")
        if not problem and self._wanted:
            problem = missing_interfaces(sorted(self._wanted), answers.reports)
        if problem:
            self._leave_out(name, problem)
            agents.__exit__()
            return
        with self._lock:
            self._agents[name], self._reports[name] = agents, answers.reports[name]
            self._said.pop(name, None)

    def _leave_out(self, name: str, problem: str) -> None:
        """Skip a host until it is retried. The same problem is printed only once."""
        self._asked[name] = time.monotonic()
        if self._said.get(name) != problem:
            self._said[name] = problem
            for line in [*problem.splitlines(), f"host {name} is skipped until it can run workers"]:
                say(line)

    def _leave(self, names: Sequence[str]) -> None:
        """End everything of the launch on hosts that have left the job."""
        for name in names:
            with self._lock:
                agents = self._agents.pop(name, None)
                self._reports.pop(name, None)
                self._asked.pop(name, None)
                self._stand_in.tell(name, {"without": True})
            if agents is not None:
                threading.Thread(target=agents.__exit__, daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            with self._lock:  # The thread that ends a leaving agent also reads its news.
                lost = [name for name, agents in self._agents.items() if self._is_lost(agents)]
            self._leave(lost)
            for name in lost:
                self._leave_out(name, f"the connection to host {name} was lost")

    def _pass_orders(self) -> None:
        with os.fdopen(self._stand_in.orders) as orders:
            for line in orders:
                order = json.loads(line)
                to = order.pop("to", None)
                with self._lock:
                    present = [one for name, one in self._agents.items() if to in (None, name)]
                for agents in present:
                    agents.order_all(**order)

    def _is_lost(self, agents: Agents) -> bool:
        agents.beat()
        for host, news in agents.news(0):
            self._stand_in.tell(host, {name: news[name] for name in _NEWS if name in news})
        return bool(agents.ended())


class FitHosts:
    """Horovod's host discovery, without the hosts that cannot run ranks."""

    def __init__(self, found: Discovery, hosts: ElasticHosts) -> None:
        self._found = found
        self._hosts = hosts

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        try:
            found = self._found.find_available_hosts_and_slots()
        except SystemExit:
            self._hosts.give_up()  # The job ends without hosts.
            raise
        return self._hosts.fit(found)
