"""One launch with agents that only remember: whose end ends the run, when, and with which message and exit code."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from hvdtrain.environment import EXIT_FAILURE, EXIT_HANG
from hvdtrain.start.parts import parameter_server_launcher
from hvdtrain.start.parts.host_processes import STOPPED
from hvdtrain.start.parts.parameter_server_launcher import Launch, Layout, layout_of


class NoAgents:
    """In the place of the agents: everything is started, and ends as the test says."""

    def __init__(self, ends: Callable[[dict[str, object]], int | None]) -> None:
        self.ends = ends
        self.limit = time.monotonic() + 20
        self.orders: list[dict[str, object]] = []
        self.told: list[dict[str, object]] = []
        self.later: list[tuple[float, dict[str, object]]] = []

    def order(self, host: str, **order: object) -> None:
        if "folder" in order:
            own = {
                "hvdtrain": parameter_server_launcher.__version__,
                "python": sys.version.split()[0],
            }
            self.told.append({"report": own | {"interfaces": {}}, "ports": [1, 2, 3]})
            return
        self.orders.append(order)
        code = self.ends(order)
        if code is not None:
            self.told.append({"ended": [order["start"], code]})

    def news(self, seconds: float) -> Iterator[tuple[str, dict[str, object]]]:
        time.sleep(0.01)
        assert time.monotonic() < self.limit, "the launch does not end"
        told, self.told = self.told, []
        due = [one for one in self.later if one[0] <= time.monotonic()]
        for one in due:
            self.later.remove(one)
            told.append(one[1])
        return iter([("", one) for one in told])

    def ended(self) -> dict[str, tuple[int, str]]:
        return {}


def test_a_worker_that_fails_again_and_again_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(parameter_server_launcher, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(parameter_server_launcher, "CHIEF_SECONDS", 0.1)
    options = parameter_server_launcher._options(["--workers", "1", "--ps", "1", "--", "python"])
    layout: Layout = layout_of(options)
    agents = NoAgents(lambda order: 9 if order["kind"] == "worker" else None)
    assert Launch(layout, options, agents, []).run() == 1  # type: ignore[arg-type]
    assert sum(order["kind"] == "worker" for order in agents.orders) == 11
    last = capfdbinary.readouterr().err.splitlines()[-1]
    assert last == (
        b"hvdtrain: worker-0 ended with exit code 9, 11 times in a row: its output is in the log folder"
    )


@pytest.mark.parametrize("first", [0, 1], ids=["the chief's end is told first", "the server's"])
def test_a_chief_that_fails_with_a_server(
    first: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    options = parameter_server_launcher._options(["--workers", "1", "--ps", "1", "--", "python"])
    now = time.monotonic()

    def end(order: dict[str, object]) -> None:
        number, code, at = {
            "chief": (0, 5, first),
            "ps": (2, 137, 1 - first),
            "worker": (1, 0, 99),
        }[str(order["kind"])]
        agents.later.append((now + 0.1 * at, {"ended": [number, code]}))

    agents = NoAgents(end)
    assert Launch(layout_of(options), options, agents, []).run() == 1  # type: ignore[arg-type]
    assert b"hvdtrain: ps-0 was killed by SIGKILL" in capfdbinary.readouterr().err
    assert time.monotonic() - now < 2


def test_a_chief_that_fails_alone() -> None:
    options = parameter_server_launcher._options(["--workers", "1", "--ps", "1", "--", "python"])
    agents = NoAgents(lambda order: 5 if order["kind"] == "chief" else None)
    assert Launch(layout_of(options), options, agents, []).run() == 5  # type: ignore[arg-type]


def test_a_chief_that_goes_on_without_a_server_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameter_server_launcher.CHIEF_SECONDS <= 15, "30 s for everything"
    monkeypatch.setattr(parameter_server_launcher, "CHIEF_SECONDS", 0.3)
    options = parameter_server_launcher._options(["--workers", "1", "--ps", "1", "--", "python"])
    agents = NoAgents(lambda order: 137 if order["kind"] == "ps" else None)
    started = time.monotonic()
    assert Launch(layout_of(options), options, agents, []).run() == 1  # type: ignore[arg-type]
    assert 0.3 < time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("chief", EXIT_HANG, "chief was stopped (SIGSTOP) and not resumed, so it was killed\n"),
        ("ps", EXIT_FAILURE, "ps-0 was stopped (SIGSTOP) and not resumed, so it was killed: the"),
    ],
)
def test_who_was_stopped_is_named(
    kind: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(parameter_server_launcher, "CHIEF_SECONDS", 0.1)
    options = parameter_server_launcher._options(["--workers", "1", "--ps", "1", "--", "python"])
    agents = NoAgents(lambda order: STOPPED if order["kind"] == kind else None)
    assert Launch(layout_of(options), options, agents, []).run() == code  # type: ignore[arg-type]
    assert capfd.readouterr().err.startswith(f"hvdtrain: {said}")


@pytest.mark.parametrize("times", [1, 2])
def test_a_chief_that_saves_for_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setenv("HVDTRAIN_GRACE_SECONDS", "0.3" if times == 1 else "60")
    options = parameter_server_launcher._options(["--workers", "1", "--ps", "1", "--", "python"])
    received: list[int] = []

    def end(order: dict[str, object]) -> None:
        if order.get("kind") == "ps":  # Everything is started.
            received.extend([signal.SIGTERM] * times)
        elif "signal" in order:
            agents.told.append({"answer": True, "ranks": [{"ending": True}]})

    agents = NoAgents(end)
    began = time.monotonic()
    code = Launch(layout_of(options), options, agents, received).run()  # type: ignore[arg-type]
    assert code == 128 + signal.SIGTERM
    assert (time.monotonic() - began >= 0.3) == (times == 1)
    assert agents.orders[-1] == {"signal": signal.SIGTERM}


def test_a_warning_ends_nothing_whenever_it_comes() -> None:
    class Late(list[int]):
        """A signal that arrives just after it was looked for."""

        def __contains__(self, number: object) -> bool:
            return False

    options = parameter_server_launcher._options(["--workers", "1", "--ps", "1", "--", "python"])
    agents = NoAgents(lambda order: 3 if order["kind"] == "chief" else None)
    launch = Launch(layout_of(options), options, agents, Late([signal.SIGUSR1]))  # type: ignore[arg-type]
    assert launch.run() == 3, "the chief's exit code"
