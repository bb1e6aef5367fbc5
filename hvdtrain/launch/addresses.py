"""This machine's own addresses and network interfaces."""

from __future__ import annotations

import os
import socket

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1"})
"""Names that every machine has for itself."""


def own_names() -> frozenset[str]:
    """Return the names of this machine."""
    return LOCAL_NAMES | {os.uname().nodename}


def address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the route to `host`. Raises OSError if `host` cannot be reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # Sends nothing: it asks the kernel for the route.
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Return the network interface on the route to `host`, or None if no interface has the route's address.

    Raises OSError if `host` cannot be reached.
    """
    import psutil

    ours = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == ours for one in addresses):
            return name
    return None


def is_this_machine(name: str) -> bool:
    """Return whether a host name belongs to this machine, by binding its address. False for an unknown name."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((name, 0))
    except OSError:
        return False
    return True
