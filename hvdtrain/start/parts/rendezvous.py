"""A safe replacement for Horovod's rendezvous server.

Over Gloo, the ranks learn each other's addresses from an HTTP server in the launching process. Horovod's own server
listens on every interface, and in an elastic job it unpickles what is PUT there: anyone who can reach the port can run
code as the user (CVE-2024-10190). This one listens at one address, and never unpickles what it receives:

- An elastic worker PUTs the addresses of its notification service and the key to it, as one of Horovod's pickles. It is
  decoded by `plain_value`, which supports strings, numbers and containers of them, and neither imports nor calls
  anything.
- The decoded value is never served to anyone: with that key, one could run code in the worker.
- `WorkerNotifier` calls these services without decoding their answers.

The ranks cannot sign what they PUT (much of it comes from Horovod's C++ library), so anyone who can reach the port can
still disturb the job, as is true of the ranks' own ports.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import pickletools
import socket
import socketserver
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.runner.common.util import secret
from horovod.runner.common.util.network import Wire
from horovod.runner.elastic.rendezvous import PUT_WORKER_ADDRESSES, create_rendezvous_handler
from horovod.runner.elastic.worker import HostsUpdatedRequest
from horovod.runner.http.http_server import (
    OK,
    RendezvousHandler,
    RendezvousHTTPServer,
    RendezvousServer,
)
from horovod.runner.util.threads import in_thread

from hvdtrain.start.parts.output_tags import say
from hvdtrain.worker.elastic_place import ARRIVAL, CHANGES, NEXT_PLACE, SAVED

FORBIDDEN = 403
LONGEST_BODY = 16 << 20
"""Maximum bytes of a request. A rank PUTs about 150 bytes for each of the others."""
ANSWER_SECONDS = 5.0
_LITERALS = frozenset(
    {
        *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
        *("BININT", "BININT1", "BININT2"),
    }
)
Addresses = Mapping[str, Sequence[tuple[str, int]]]


class Rendezvous(RendezvousServer):
    """Horovod's server, bound to one address, with a guard in front of Horovod's handler.

    Args:
        address: Function that returns the address, called when the server starts: in an elastic job, the hosts must be
            known first.
    """

    def __init__(self, address: Callable[[], str], verbose: int = 0) -> None:
        super().__init__(verbose)
        self._address = address

    def start(self, handler_cls: type[RendezvousHandler] = RendezvousHandler) -> int:
        """Serve in a thread, and return the port."""
        handler = type("GuardedHandler", (_Guard, handler_cls), {})
        self._httpd = _Server((self._address(), 0), handler, self._verbose)
        self._listen_thread = in_thread(target=self._httpd.serve_forever)
        port: int = self._httpd.server_address[1]
        return port


class _Server(RendezvousHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def server_bind(self) -> None:
        # HTTPServer's own method resolves the host name of the address, which may take seconds.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: tuple[str, int]) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError):  # The worker that asked may have died.
            _log_refusal(client_address[0], "a request", type(error).__name__)


class _Refused(Exception):
    """Received data that no worker sends."""


class _Guard(RendezvousHandler):
    """Guards Horovod's handlers of static and elastic jobs."""

    def do_HEAD(self) -> None:
        # SimpleHTTPRequestHandler's method would list the files in the working folder.
        self.send_status_code(FORBIDDEN)

    def do_DELETE(self) -> None:
        """Note that a rank has found the others of a scope; forget the scope when all have.

        Horovod's method then also forgets who is done with the other scopes. Their addresses remain, and ranks that
        shut Horovod down and start it again may take them for those of the second start.
        """
        server = self.server
        _, scope, key = [*self.path.split("/"), "", ""][:3]
        if scope not in server.scope_size:
            super().do_DELETE()
            return
        with server.finished_list_lock:
            done = server.finished_list[scope]
            done.append(key)
            if len(done) == server.scope_size[scope]:
                del server.finished_list[scope]
                with server.cache_lock:
                    server.cache.get(scope, {}).clear()
        self.send_status_code(OK)

    def do_PUT(self) -> None:
        try:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > LONGEST_BODY:
                raise _Refused("its length is missing or too large")
            super().do_PUT()
        except _Refused as reason:
            self.close_connection = True
            _log_refusal(self.client_address[0], f"PUT {self.path}", str(reason))
            self.send_status_code(FORBIDDEN)

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        if scope != PUT_WORKER_ADDRESSES:
            super()._put_value(scope, key, value)
            return
        host, _, local_rank = key.rpartition(":")
        try:
            addresses, service_key = read_worker_addresses(value)
            slot = int(local_rank)
        except ValueError as error:
            raise _Refused(f"not a worker's addresses: {error}") from error
        # A script written for elastic workers may run in a static job.
        if hasattr(self, "_put_worker_addresses"):
            self._put_worker_addresses(host, slot, addresses, service_key)


def elastic_handler(driver: Any) -> type[RendezvousHandler]:
    """Return Horovod's handler of an elastic job, extended for the requests of our workers (`elastic_place`)."""
    handler: Any = create_rendezvous_handler(driver)

    class Handler(handler):
        def _get_value(self, scope: str, key: str) -> bytes | None:
            if scope == SAVED:
                return key.encode() if driver.has_checkpoint else b""
            if scope not in (ARRIVAL, NEXT_PLACE):
                value: bytes | None = super()._get_value(scope, key)
                return value
            host, _, slot = key.rpartition(":")
            place = (driver.arrive if scope == ARRIVAL else driver.next_place)(host, int(slot))
            answer: bytes = place.to_response_string().encode()
            return answer

        def _get_rank_and_size(self, host: str, slot: int) -> bytes:
            # Horovod asks when it restarts in a worker, which has already asked for its assignment.
            if driver.has_arrived(host, slot):
                slot_info = driver.get_slot_info(host, slot)
                known: bytes = slot_info.to_response_string().encode()
                return known
            asked: bytes = super()._get_rank_and_size(host, slot)
            return asked

        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            if scope == SAVED:
                driver.note_saved(key)
            elif scope == CHANGES:
                driver.tell_changes()
            else:
                super()._put_value(scope, key, value)

    return Handler


class WorkerNotifier:
    """Tells a worker that the hosts have changed. Horovod's own client unpickles whatever the address answers."""

    def __init__(self, addresses: Addresses, key: bytes, verbose: int = 0) -> None:
        self._addresses = [address for several in addresses.values() for address in several]
        self._key = key

    def notify_hosts_updated(self, timestamp: int, update_res: Any) -> None:
        """Notify the worker. Raises ConnectionError if it does not acknowledge."""
        for address in self._addresses:
            with contextlib.suppress(OSError, struct.error):
                if self._tell(address, HostsUpdatedRequest(timestamp, update_res)):
                    return
        raise ConnectionError(f"no worker answers at {self._addresses}")

    def _tell(self, address: tuple[str, int], request: object) -> bool:
        """Send the request as Horovod does, and return whether the answer has the worker's signature."""
        with (
            socket.create_connection(address, ANSWER_SECONDS) as connection,
            connection.makefile("rwb") as stream,
        ):
            Wire(self._key).write(request, stream)
            digest = stream.read(secret.DIGEST_LENGTH)
            (length,) = struct.unpack("i", stream.read(4))
            if not 0 < length < LONGEST_BODY:
                return False
            return bool(secret.check_digest(self._key, stream.read(length), digest))


def read_worker_addresses(body: bytes) -> tuple[Addresses, bytes]:
    """Decode the addresses by interface, and the key, of a worker's notification service. Raises ValueError."""
    try:
        value = plain_value(base64.b64decode(body, validate=True))
    except (binascii.Error, LookupError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
    match value:
        case (dict(addresses), bytes(key)) if len(key) == secret.SECRET_LENGTH:
            if all(_is_interface(name, several) for name, several in addresses.items()):
                return addresses, key
    raise ValueError("it has another shape")


def plain_value(data: bytes) -> object:
    """Decode a pickle that consists of strings, bytes, integers, and dicts, lists and pairs of them.

    Unlike an unpickler, this has no operation that imports or calls anything.

    Raises:
        ValueError: The pickle contains anything else.
        LookupError, TypeError, AttributeError: The pickle is malformed.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case name if name in _LITERALS:
                stack.append(argument)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "MEMOIZE":
                memo.append(stack[-1])
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int(argument or 0)])
            case "TUPLE2":
                stack[-2:] = [tuple(stack[-2:])]
            case "MARK":
                marks.append(len(stack))
            case "APPEND" | "APPENDS" as name:
                items = _taken(stack, marks.pop() if name == "APPENDS" else -1)
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS" as name:
                items = _taken(stack, marks.pop() if name == "SETITEMS" else -2)
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"it contains {name}")
    raise ValueError("it has no end")


def _taken(stack: list[Any], at: int) -> list[Any]:
    """Pop everything on the stack from index `at`."""
    items = stack[at:]
    del stack[at:]
    return items


def _is_interface(name: object, several: object) -> bool:
    return (
        isinstance(name, str)
        and isinstance(several, list)
        and all(
            isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)
            # A bool is an int, but not a port.
            and type(one[1]) is int
            for one in several
        )
    )  # fmt: skip


def _log_refusal(peer: str, what: str, reason: str) -> None:
    """Log in one line, even if a stranger wrote what it quotes."""
    say(ascii(f"refused {what[:80]} from {peer}: {reason[:200]}")[1:-1])
