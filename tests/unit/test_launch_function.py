"""`hvdtrain.launch` before any rank starts, and the listener that gives its function to those who have the key."""

import socket
import threading
import time
from multiprocessing import AuthenticationError

import pytest

import hvdtrain
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.running import function_server as exchange_module
from hvdtrain.launch.running.function_server import FunctionServer
from hvdtrain.worker.signed_messages import FUNCTION, Caller, caller_of, seal, unseal


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_who_has_the_key_gets_the_function_and_gives_a_result(host: str | None) -> None:
    with FunctionServer(b"the function", host) as exchange:
        caller = caller_of(exchange.caller.variables())
        assert caller == exchange.caller
        assert caller.function() == b"the function"
        caller.give(1, b"one")
        assert exchange.results == {1: b"one"}
    with pytest.raises(OSError):
        caller.function()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_stranger_gets_nothing_and_gives_nothing(host: str | None) -> None:
    with FunctionServer(b"the function", host) as exchange:
        stranger = Caller(exchange.caller.address, b"another key")
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            stranger.function()
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            stranger.give(0, b"evil")
        assert exchange.results == {}
        assert exchange.caller.function() == b"the function"


def test_a_stranger_who_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else as many as there may be open files would keep the ranks out."""
    monkeypatch.setattr(exchange_module, "SILENCE_SECONDS", 1)
    with (
        FunctionServer(b"the function", "127.0.0.1") as exchange,
        socket.create_connection(exchange.caller.address, timeout=10) as stranger,
        stranger.makefile("rb") as answers,
    ):
        assert b"#CHALLENGE#" in answers.read()


def test_a_listener_that_cannot_accept_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError("Too many open files")

    with FunctionServer(b"the function", "127.0.0.1") as exchange:
        monkeypatch.setattr(exchange._listener, "accept", full)
        socket.create_connection(exchange.caller.address).close()  # Ends the call that waits.
        begun = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - begun < 0.25


@pytest.mark.parametrize(
    "message", [b"", b"x" * 40, seal(b"another", FUNCTION, b"f"), seal(b"key", b"result 1", b"f")]
)
def test_what_is_not_signed_for_its_purpose_is_refused(message: bytes) -> None:
    assert unseal(b"key", FUNCTION, seal(b"key", FUNCTION, b"f")) == b"f"
    with pytest.raises(HvdtrainError, match="no valid signature"):
        unseal(b"key", FUNCTION, message)


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(Caller("/tmp/socket", b"secret"))


def test_a_host_without_address_is_named() -> None:
    with pytest.raises(UsageError, match=r"host no-such-host\.invalid: it cannot be reached"):
        FunctionServer(b"the function", "no-such-host.invalid").__enter__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"np": 0}, r"np=0\): pass a whole number, at least 1"),
        ({"np": "2"}, r"np='2'\): pass a whole number, at least 1"),
        ({"args": (1, threading.Lock())}, r"args\[1\] cannot be pickled"),
        ({"kwargs": {"lock": threading.Lock()}}, r"kwargs\['lock'\] cannot be pickled"),
        ({"function": threading.Lock().acquire}, "the function cannot be pickled"),
        ({"function": 3}, "3 is not a function"),
        ({"hosts": ["a"]}, r"hosts=\['a'\]\): pass a string: 'node1:4"),
        ({"args": 5}, r"args=5\): pass a list or tuple"),
        ({"args": "ab"}, r"args='ab'\): pass a list or tuple"),
        ({"kwargs": [("a", 1)]}, r"kwargs=\[\('a', 1\)\]\): pass a dict"),
        ({"kwargs": {1: 2}}, r"kwargs=1\): its keys are names"),
        ({"controller": None}, r"controller=None\): choose one of auto, "),
        ({"log_dir": b"x"}, r"log_dir=b'x'\): pass the path of a folder"),
        ({"log_dir": "a\0b"}, r"log_dir='a\\x00b'\): pass the path of a folder"),
        ({"hang_timeout": "x"}, r"hang_timeout='x'\): pass a number of seconds, or 0"),
        ({"hang_timeout": -1}, r"hang_timeout=-1\): pass a number of seconds, or 0"),
        ({"hang_timeout": float("nan")}, r"hang_timeout=nan\): pass a number of seconds"),
    ],
)
def test_what_cannot_work_is_one_message(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hvdtrain.launch(**{"function": print, **options})


def test_only_the_main_thread_launches() -> None:
    found = []

    def launch() -> None:
        with pytest.raises(UsageError, match="from the main thread") as caught:
            hvdtrain.launch(print)
        found.append(caught)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert found


def test_inside_of_a_rank_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="processes of another launch"):
        hvdtrain.launch(print)
