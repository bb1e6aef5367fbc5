"""Serve the function of `hvdtrain.launch` to its ranks, and collect their results.

Ranks on this machine connect to a Unix socket in a folder that only this user can enter. For other hosts, the server
listens at the one address from which they are reached. Every client must first prove that it has the launch's key.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.addresses import address_towards
from hvdtrain.worker.signed_messages import FUNCTION, RECEIVED, Caller, result_of, seal, unseal

SILENCE_SECONDS = 30
PAUSE_SECONDS = 0.1
_KEY_BYTES = 32
_RESULT = re.compile(rb"result (\d{1,9})")


@dataclass
class FunctionServer:
    """Server for a pickled function, used as a context manager.

    Attributes:
        function: Pickled function with its arguments.
        host: One of the other hosts, or None if all ranks are on this machine.
        results: Mapping from rank to its pickled return value.
        caller: Address and key with which the ranks connect.

    Raises:
        UsageError: `host` cannot be reached (on entering the context).
    """

    function: bytes
    host: str | None = None
    results: dict[int, bytes] = field(default_factory=dict)
    caller: Caller = field(init=False)
    _closed: bool = False

    def __enter__(self) -> FunctionServer:
        key = secrets.token_bytes(_KEY_BYTES)
        if self.host is None:
            # Not in TMPDIR, which may be too long for a socket's path.
            self._folder = tempfile.TemporaryDirectory(prefix="hvdtrain-function-", dir="/tmp")
            self._listener = Listener(f"{self._folder.name}/socket", "AF_UNIX", backlog=128)
        else:
            self._listener = Listener((_address_towards(self.host), 0), "AF_INET", backlog=128)
        self.caller = Caller(self._listener.address, key)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        # Closing the socket does not wake the thread that waits in accept().
        with suppress(OSError):
            family = socket.AF_UNIX if self.host is None else socket.AF_INET
            with socket.socket(family) as waking:
                waking.connect(self.caller.address)
        self._listener.close()
        if self.host is None:
            self._folder.cleanup()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError:
                time.sleep(PAUSE_SECONDS)  # Too many open files; wait for some connections to end.
                continue
            # A silent stranger must not keep the ranks waiting.
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(OSError, EOFError, AuthenticationError, HvdtrainError):
            key = self.caller.key
            _limit(connection)
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            wanted = connection.recv_bytes(100)
            if wanted == FUNCTION:
                connection.send_bytes(seal(key, FUNCTION, self.function))
            elif found := _RESULT.fullmatch(wanted):
                rank = int(found[1])
                content = unseal(key, result_of(rank), connection.recv_bytes())
                self.results.setdefault(rank, content)
                connection.send_bytes(RECEIVED)


def _limit(connection: Connection) -> None:
    """Set a timeout, so that silent clients cannot exhaust this process's file descriptors."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        seconds = struct.pack("ll", SILENCE_SECONDS, 0)
        for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, way, seconds)


def _address_towards(host: str) -> str:
    """Return the address at which ranks on `host` reach this machine. Raises UsageError if there is none."""
    try:
        return address_towards(host)
    except OSError as error:
        raise UsageError(
            f"host {host}: it cannot be reached from here ({error.strerror or error}): use a name "
            "that resolves, or an address"
        ) from error
