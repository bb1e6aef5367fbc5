"""Signed messages between `hvdtrain.launch` and its ranks.

They are pickles, so each is signed with the launch's key, and is read only if its signature is valid. The key is 32
random bytes, which reach the ranks as a secret variable. Without it nobody can get the function or have anything
unpickled; somebody between two hosts can read a message, but not change it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection

from hvdtrain.errors import HvdtrainError

ADDRESS = "HVDTRAIN_FUNCTION_ADDRESS"
KEY = "HVDTRAIN_FUNCTION_KEY"
FUNCTION = b"function"
RECEIVED = b"received"


def result_of(rank: int) -> bytes:
    """Return the name of a rank's result."""
    return b"result %d" % rank


def seal(key: bytes, name: bytes, content: bytes) -> bytes:
    """Return `content` preceded by its signature, which is valid for `name` only."""
    return _signature(key, name, content) + content


def unseal(key: bytes, name: bytes, message: bytes) -> bytes:
    """Return the content of a message from `seal`.

    Raises:
        HvdtrainError: The message was not signed with this key and name.
    """
    size = len(_signature(key, b"", b""))
    signature, content = message[:size], message[size:]
    if not hmac.compare_digest(signature, _signature(key, name, content)):
        raise HvdtrainError(
            f"the {name.decode()} has no valid signature: another program answers at this address"
        )
    return content


@dataclass(frozen=True)
class Caller:
    """Address and key of the process that has called `hvdtrain.launch`."""

    address: str | tuple[str, int]
    key: bytes = field(repr=False)

    def function(self) -> bytes:
        """Fetch the function and its arguments, pickled.

        Raises:
            HvdtrainError: The message has no valid signature.
            OSError, EOFError: The caller cannot be reached.
        """
        with self._connected() as connection:
            connection.send_bytes(FUNCTION)
            return unseal(self.key, FUNCTION, connection.recv_bytes())

    def give(self, rank: int, result: bytes) -> None:
        """Send a rank's pickled result.

        Raises:
            OSError, EOFError: The caller cannot be reached.
        """
        with self._connected() as connection:
            connection.send_bytes(result_of(rank))
            connection.send_bytes(seal(self.key, result_of(rank), result))
            connection.recv_bytes(len(RECEIVED))

    def variables(self) -> dict[str, str]:
        """Return the variables that pass address and key to a rank."""
        parts = [self.address] if isinstance(self.address, str) else map(str, self.address)
        return {ADDRESS: ":".join(parts), KEY: self.key.hex()}

    def _connected(self) -> Connection:
        return Client(self.address, authkey=self.key)


def caller_of(variables: Mapping[str, str]) -> Caller:
    """Return the caller that `variables` describe; raise KeyError if they are missing."""
    text, key = variables[ADDRESS], bytes.fromhex(variables[KEY])
    if text.startswith("/"):
        return Caller(text, key)
    host, _, port = text.rpartition(":")
    return Caller((host, int(port)), key)


def _signature(key: bytes, name: bytes, content: bytes) -> bytes:
    return hmac.digest(key, b"%d %s %s" % (len(name), name, content), "sha256")
