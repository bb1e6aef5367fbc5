"""The ssh options for a launch and for the doctor: ssh uses the user's own configuration.

One setting is overridden: host keys that have changed are always refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.launch.running.timed_command import ask

BATCH = ("-o", "BatchMode=yes")
"""No question to the user: nobody answers it."""
ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
"""A connection that broke is noticed within 30 s."""
ACCEPT_NEW = ("-o", "StrictHostKeyChecking=accept-new")
"""A key that was never seen is accepted and remembered; one that has changed is refused."""
_PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")


def where(port: int | None, identity_file: object | None) -> list[str]:
    """The port and the key; None leaves it to ssh and its configuration."""
    return [
        *(["-p", str(port)] if port is not None else []),
        *(["-i", str(identity_file)] if identity_file is not None else []),
    ]


def path_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which the interpreter and its modules are found on another host."""
    return {name: environ[name] for name in _PATHS if name in environ}


def unseen_keys(
    host: str,
    port: int | None = None,
    identity_file: object | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """ACCEPT_NEW, unless the user's configuration is as strict (`accept-new`) or stricter (`yes`); then nothing.

    Where it says `ask`, nobody is there to answer. Where it says `no`, ssh would connect to a host whose key has
    changed, and the launch's secrets would go there.
    """
    said = ask(["ssh", "-G", *where(port, identity_file), host], environ=environ)
    lax = {"stricthostkeychecking ask", "stricthostkeychecking false"}
    return ACCEPT_NEW if lax & set(said.answer.splitlines()) else ()
