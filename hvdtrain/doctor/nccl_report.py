"""Make an NCCL communicator over the first N GPUs: `python -m hvdtrain.doctor.nccl_report N`.

Prints one marked line of JSON: {"version": "2.27.3"}, or {"error": TEXT}. Standard library only.
"""

import ctypes
import json
import sys
import sysconfig
from pathlib import Path

MARKER = "@hvdtrain-nccl "


def report(gpus: int, library: str) -> dict[str, str]:
    """Make and destroy the communicators. The C functions: nccl.h."""
    try:
        nccl = ctypes.CDLL(library)
    except OSError as error:
        return {"error": str(error)}
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    communicators = (ctypes.c_void_p * gpus)()
    failed = nccl.ncclCommInitAll(communicators, gpus, None)
    if failed:
        return {"error": f"NCCL: {nccl.ncclGetErrorString(failed).decode()}"}
    for communicator in communicators:
        nccl.ncclCommDestroy(ctypes.c_void_p(communicator))
    number = ctypes.c_int()
    nccl.ncclGetVersion(ctypes.byref(number))
    return {"version": readable(number.value)}


def readable(version: int) -> str:
    """`2.27.3` of 22703: NCCL_VERSION in nccl.h."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def find_library() -> str:
    """The wheel's, as Horovod was linked to, else the system's."""
    wheel = Path(sysconfig.get_path("platlib"), "nvidia/nccl/lib/libnccl.so.2")
    return str(wheel) if wheel.is_file() else "libnccl.so.2"


if __name__ == "__main__":
    print(MARKER + json.dumps(report(int(sys.argv[1]), find_library())), flush=True)
