"""This machine's own addresses and network interfaces."""

from __future__ import annotations

import socket


def address_towards(host: str) -> str:
    """The IPv4 address of this machine from which `host` is reached. Raises OSError if it cannot be reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # Sends nothing: it asks the kernel for the route.
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """The network interface by which `host` is reached; None if none has the route's address. Raises OSError."""
    import psutil

    ours = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == ours for one in addresses):
            return name
    return None


def is_this_machine(name: str) -> bool:
    """Whether a host name belongs to this machine, found by binding its address. False for an unknown name."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((name, 0))
    except OSError:
        return False
    return True
