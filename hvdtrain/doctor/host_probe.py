"""What a host says about itself: run there by ssh, as a text given to its Python, before anything of hvdtrain is known
to be there. Standard library only, and readable for old Pythons too: to say that they are old is its purpose.

    ssh HOST exec PYTHON - REQUEST < host_probe.py

REQUEST is JSON: {"addresses": [[ADDRESS, PORT], ...], "folder": FOLDER}. Prints one marked line of JSON: `report`.
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
"""From linux/sockios.h: the IPv4 address of an interface."""


def report(request):  # type: ignore[no-untyped-def] # old Pythons know no annotations of variables
    """Versions, interfaces, which of the asker's addresses can be reached, whether its folder is here, the clock."""
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
    """Its version; None if it is not installed."""
    try:
        from importlib.metadata import PackageNotFoundError, version
    except ImportError:
        return None  # Python 3.7 or older, which is reported anyway.
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def package_folder(name: str):  # type: ignore[no-untyped-def]
    """Where it would be imported from; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    return os.path.dirname(spec.origin) if spec and spec.origin else None  # noqa: PTH120


def interfaces():  # type: ignore[no-untyped-def]
    """Name -> IPv4 address of the interfaces that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # It has no address.
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def reached(addresses):  # type: ignore[no-untyped-def]
    """Those of [[ADDRESS, PORT], ...] that a connection can be made to. All at once: each may take its whole time."""
    with ThreadPoolExecutor(len(addresses) or 1) as pool:
        answers = list(pool.map(lambda pair: reaches(*pair), addresses))
    return [address for (address, _), answer in zip(addresses, answers) if answer]  # noqa: B905


def reaches(address: str, port: int):  # type: ignore[no-untyped-def]
    """Whether a connection is accepted there."""
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(MARKER + json.dumps(report(json.loads(sys.argv[1]))))
