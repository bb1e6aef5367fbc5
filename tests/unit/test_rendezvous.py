"""The rendezvous of ranks over Gloo: it serves Horovod's workers, and runs nothing that a stranger sends."""

from __future__ import annotations

import base64
import http.client
import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from horovod.runner.common.util import codec, secret
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationService
from horovod.runner.http.http_client import put_data_into_kvstore
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.start.parts.rendezvous import (
    Rendezvous,
    WorkerNotifier,
    elastic_handler,
    plain_value,
    read_worker_addresses,
)

ADDRESSES = {"lo": [("127.0.0.1", 34588)], "eth0": [("10.1.1.1", 34588), ("10.1.1.2", 70)]}
KEY = b"k" * secret.SECRET_LENGTH
PLACE = "/worker_addresses/node1:0"


class Exploit:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Driver:
    """What an elastic job's handler calls."""

    def __init__(self) -> None:
        self.registered: list[Any] = []

    def register_worker_server(self, *worker: Any) -> None:
        self.registered.append(worker)


@pytest.fixture(scope="module")
def job() -> Iterator[tuple[int, Driver]]:
    driver = Driver()
    server = Rendezvous(lambda: "127.0.0.1")
    port = server.start(create_rendezvous_handler(driver))
    server.init([])
    yield port, driver
    server.stop()


@pytest.fixture
def port(job: tuple[int, Driver]) -> int:
    return job[0]


@pytest.fixture
def driver(job: tuple[int, Driver]) -> Driver:
    job[1].registered.clear()
    return job[1]


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_workers_are_served(port: int, driver: Driver) -> None:
    assert ask(port, "PUT", "/global/0", b"any bytes")[0] == 200
    assert ask(port, "GET", "/global/0") == (200, b"any bytes")
    assert ask(port, "DELETE", "/global/0")[0] == 200
    assert ask(port, "GET", "/global/0")[0] == 404
    put_data_into_kvstore("127.0.0.1", port, "worker_addresses", "node1:0", (ADDRESSES, KEY))
    assert driver.registered == [("node1", 0, ADDRESSES, KEY)]


class ElasticDriver(Driver):
    """Knows the ranks of host a, of which the first has asked for its place before it starts Horovod."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[str] = []
        self.has_checkpoint = False
        self.ready: list[tuple[str, int]] = []
        self.asked_for_changes = 0

    def arrive(self, host: str, slot: int) -> SlotInfo:
        return SlotInfo(host, 3, slot, 0, 4, 2, 1)

    def next_place(self, host: str, slot: int) -> SlotInfo:
        return SlotInfo(host, 2, slot, 0, 4, 2, 1)

    def record_ready(self, host: str, slot: int) -> None:
        self.ready.append((host, slot))

    def get_slot_info(self, host: str, slot: int) -> SlotInfo:
        return SlotInfo(host, slot, slot, 0, 4, 2, 1)

    def has_arrived(self, host: str, slot: int) -> bool:
        return slot == 0

    def note_saved(self, where: str) -> None:
        self.saved.append(where)

    def tell_changes(self) -> None:
        self.asked_for_changes += 1


def test_workers_of_ours_ask_for_their_place_before_horovod_does() -> None:
    driver = ElasticDriver()
    server = Rendezvous(lambda: "127.0.0.1")
    port = server.start(elastic_handler(driver))
    server.init([])
    assert ask(port, "GET", "/hvdtrain_arrival/a:0") == (200, b"3,4,0,2,0,1")
    assert ask(port, "GET", "/hvdtrain_next_place/a:0") == (200, b"2,4,0,2,0,1")
    assert ask(port, "GET", "/rank_and_size/a:0") == (200, b"0,4,0,2,0,1")
    assert driver.ready == [], "it would wait for another round"
    assert ask(port, "GET", "/rank_and_size/a:1") == (200, b"1,4,1,2,0,1")
    assert driver.ready == [("a", 1)]
    assert ask(port, "PUT", "/hvdtrain_saved/disk", b"")[0] == 200
    assert driver.saved == ["disk"]
    assert ask(port, "GET", "/hvdtrain_saved/disk") == (200, b"")
    driver.has_checkpoint = True
    assert ask(port, "GET", "/hvdtrain_saved/disk") == (200, b"disk")
    assert ask(port, "PUT", "/hvdtrain_changes/hosts", b"")[0] == 200
    assert driver.asked_for_changes == 1
    server.stop()


def test_the_key_of_a_worker_is_told_to_nobody(port: int) -> None:
    put_data_into_kvstore("127.0.0.1", port, "worker_addresses", "node1:0", (ADDRESSES, KEY))
    assert ask(port, "GET", PLACE) == (404, b"")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_strangers_pickle_is_refused_and_runs_nothing(
    port: int, driver: Driver, tmp_path: Path, protocol: int, capfd: pytest.CaptureFixture[str]
) -> None:
    for value in (Exploit(tmp_path / "ran"), ({"lo": [("a", Exploit(tmp_path / "ran"))]}, KEY)):
        body = base64.b64encode(pickle.dumps(value, protocol))
        assert ask(port, "PUT", PLACE, body)[0] == 403
    said = capfd.readouterr().err
    assert said.count("hvdtrain: refused PUT /worker_addresses/node1:0 from 127.0.0.1: not a") == 2
    assert (driver.registered, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(
    "value",
    [
        *((ADDRESSES, KEY[1:]), (ADDRESSES, "k" * 32), ("", KEY), [], 7),
        *(
            ({"lo": wrong}, KEY)
            for wrong in ([("a", "22")], [("a", 22, 0)], [("a", True)], {}, "a")
        ),
        ({7: []}, KEY),
    ],
)
def test_other_values_are_refused(port: int, driver: Driver, value: Any) -> None:
    assert ask(port, "PUT", PLACE, codec.dumps_base64(value, to_ascii=False))[0] == 403
    assert driver.registered == []


def test_requests_of_no_worker(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text("x")
    assert ask(port, "HEAD", "/secret")[0] == 403, "the working folder is nobody's business"
    assert ask(port, "PUT", "/a/b", b"", **{"Content-Length": str(1 << 40)})[0] == 403
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(port, "GET", "/a/b/c/d")
    assert (
        "[0]<stderr>:hvdtrain: refused a request from 127.0.0.1: ValueError\n"
        in capfd.readouterr().err
    )


def test_a_scope_that_is_done_leaves_the_others_as_they_are() -> None:
    """Ranks that start Horovod again find no addresses of the first start, in whatever order they were done."""
    server = Rendezvous(lambda: "127.0.0.1")
    port = server.start()
    try:
        server._httpd.scope_size = {"local_a": 2, "cross_0": 1}
        assert ask(port, "PUT", "/local_a/0", b"first start")[0] == 200
        for done in ("/local_a/0", "/cross_0/0", "/local_a/1"):
            assert ask(port, "DELETE", done)[0] == 200
        assert ask(port, "GET", "/local_a/0")[0] == 404
        assert ask(port, "PUT", "/local_a/0", b"second start")[0] == 200
        assert ask(port, "DELETE", "/local_a/1")[0] == 200
        assert ask(port, "GET", "/local_a/0")[0] == 200, "one of two is done"
    finally:
        server.stop()


def test_it_listens_at_its_address_alone(port: int) -> None:
    with socket.socket() as other:
        # Another of the loopback's addresses is still free: nobody listens at all of them.
        other.bind(("127.0.0.2", port))


plain = st.recursive(
    st.integers(-(2**31), 2**31 - 1) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.binary(), inner)
    ),
)


@given(plain)
def test_plain_values_are_decoded_as_an_unpickler_does(value: Any) -> None:
    assert plain_value(cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)) == value


@given(st.binary())
def test_any_other_bytes_are_a_value_error(data: bytes) -> None:
    for body in (data, base64.b64encode(data), base64.b64encode(b"\x80\x05" + data)):
        with pytest.raises(ValueError):
            read_worker_addresses(body)


class Manager:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def handle_hosts_updated(self, *update: Any) -> None:
        self.told.append(update)


def test_workers_are_told_of_changed_hosts() -> None:
    manager = Manager()
    service = WorkerNotificationService(KEY, "lo", manager)
    try:
        dead = [("127.0.0.1", 1)]
        WorkerNotifier({"x": dead, **service.addresses()}, KEY).notify_hosts_updated(
            7, HostUpdateResult.added
        )
        assert manager.told == [(7, HostUpdateResult.added)]
        with pytest.raises(ConnectionError):
            WorkerNotifier({"x": dead}, KEY).notify_hosts_updated(8, HostUpdateResult.added)
    finally:
        service.shutdown()


def test_an_answer_is_not_unpickled(tmp_path: Path) -> None:
    """Whoever PUTs addresses chooses the key: its signature proves nothing."""
    answer = pickle.dumps(Exploit(tmp_path / "ran"))
    digest = secret.compute_digest(KEY, answer)

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(digest + struct.pack("i", len(answer)) + answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        address = listener.getsockname()
        WorkerNotifier({"lo": [address]}, KEY).notify_hosts_updated(1, HostUpdateResult.added)
    assert list(tmp_path.iterdir()) == []
