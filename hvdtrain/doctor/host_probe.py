"""Print properties of a host: sent over ssh to the host's Python as a program, before it is known whether hvdtrain is
installed there. Uses only the standard library, and runs on old Pythons too, as it must report that they are old.

    ssh HOST exec PYTHON - REQUEST < host_probe.py

REQUEST is JSON: {"addresses": [[ADDRESS, PORT], ...], "folder": FOLDER}. Prints the result of `report` as one marked
line of JSON.
"""

import fcntl
import importlib.util
import json
import os
import platform
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

MARKER = "@hvdtrain-host "
DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "hvdtrain")
_CONNECT_SECONDS = 3.0
_SIOCGIFADDR = 0x8915
"""Request for the IPv4 address of an interface, from linux/sockios.h."""


def report(request):  # type: ignore[no-untyped-def] # old Pythons know no annotations of variables
    """Return versions, interfaces, which of the addresses can be reached, whether the folder exists, and the time."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in DISTRIBUTIONS},
        "package": package_folder("hvdtrain"),
        "interfaces": interfaces(),
        "reached": reached(request["addresses"]),
        "folder": os.path.isdir(request["folder"]),  # noqa: PTH112
        "time": time.time(),
    }


def version_of(distribution: str):  # type: ignore[no-untyped-def]
    """Return the version of a distribution. None if it is not installed."""
    try:
        from importlib.metadata import PackageNotFoundError, version
    except ImportError:
        return None  # Python 3.7 or older, which is reported anyway.
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def package_folder(name: str):  # type: ignore[no-untyped-def]
    """Return the folder from which a package would be imported. None if it is not installed."""
    spec = importlib.util.find_spec(name)
    return os.path.dirname(spec.origin) if spec and spec.origin else None  # noqa: PTH120


def interfaces():  # type: ignore[no-untyped-def]
    """Return the IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # The interface has no address.
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def reached(addresses):  # type: ignore[no-untyped-def]
    """Return the addresses in [[ADDRESS, PORT], ...] that accept a connection. In parallel, as each may time out."""
    with ThreadPoolExecutor(len(addresses) or 1) as pool:
        answers = list(pool.map(lambda pair: reaches(*pair), addresses))
    return [address for (address, _), answer in zip(addresses, answers) if answer]  # noqa: B905


def reaches(address: str, port: int):  # type: ignore[no-untyped-def]
    """Return whether a connection is accepted."""
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(MARKER + json.dumps(report(json.loads(sys.argv[1]))))
