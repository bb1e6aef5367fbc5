"""ssh options for launches and the doctor. ssh uses the user's own configuration.

One setting is overridden: a changed host key is always refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.launch.running.timed_command import ask

BATCH = ("-o", "BatchMode=yes")
"""Disables prompts, which nobody would answer."""
ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
"""Detects a broken connection within 30 s."""
ACCEPT_NEW = ("-o", "StrictHostKeyChecking=accept-new")
"""Accepts and remembers an unknown host key, and refuses a changed one."""
_PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")


def where(port: int | None, identity_file: object | None) -> list[str]:
    """Return the options for port and key; None leaves them to ssh and its configuration."""
    return [
        *(["-p", str(port)] if port is not None else []),
        *(["-i", str(identity_file)] if identity_file is not None else []),
    ]


def path_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which the interpreter and its modules are found on another host."""
    return {name: environ[name] for name in _PATHS if name in environ}


def unseen_keys(
    host: str,
    port: int | None = None,
    identity_file: object | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return ACCEPT_NEW, or nothing if the user's configuration is as strict (`accept-new`) or stricter (`yes`).

    With `ask`, nobody is there to answer. With `no`, ssh would connect to a host whose key has changed, exposing the
    launch's secrets to it.
    """
    said = ask(["ssh", "-G", *where(port, identity_file), host], environ=environ)
    lax = {"stricthostkeychecking ask", "stricthostkeychecking false"}
    return ACCEPT_NEW if lax & set(said.answer.splitlines()) else ()
