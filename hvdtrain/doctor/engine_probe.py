"""What Horovod and NCCL can do here, tried in a process of its own: `python -m hvdtrain.doctor.engine_probe WHAT`.

Prints one marked line of JSON. `horovod` loads Horovod and TensorFlow: the fields of `hvdtrain.doctor.horovod.Build`.
`nccl N` makes an NCCL communicator over the first N GPUs, without either: {"version": "2.27.3"} or {"error": TEXT}.
"""

import ctypes
import json
import sys
import sysconfig
from pathlib import Path

MARKER = "@hvdtrain-engine "


def horovod() -> dict[str, bool | int]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    return {
        "mpi": bool(hvd.mpi_built()),
        "gloo": bool(hvd.gloo_built()),
        "nccl": bool(hvd.nccl_built()),
        "tensorflow_cuda": bool(tf.test.is_built_with_cuda()),
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }


def nccl(gpus: int, library: str) -> dict[str, str]:
    """Make and destroy the communicators. The C functions: nccl.h."""
    try:
        functions = ctypes.CDLL(library)
    except OSError as error:
        return {"error": str(error)}
    functions.ncclGetErrorString.restype = ctypes.c_char_p
    communicators = (ctypes.c_void_p * gpus)()
    failed = functions.ncclCommInitAll(communicators, gpus, None)
    if failed:
        return {"error": f"NCCL: {functions.ncclGetErrorString(failed).decode()}"}
    for communicator in communicators:
        functions.ncclCommDestroy(ctypes.c_void_p(communicator))
    number = ctypes.c_int()
    functions.ncclGetVersion(ctypes.byref(number))
    return {"version": readable(number.value)}


def readable(version: int) -> str:
    """`2.27.3` of 22703: NCCL_VERSION in nccl.h."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def nccl_library() -> str:
    """The wheel's, as Horovod was linked to, else the system's."""
    wheel = Path(sysconfig.get_path("platlib"), "nvidia/nccl/lib/libnccl.so.2")
    return str(wheel) if wheel.is_file() else "libnccl.so.2"


if __name__ == "__main__":
    answer = horovod() if sys.argv[1] == "horovod" else nccl(int(sys.argv[2]), nccl_library())
    print(MARKER + json.dumps(answer), flush=True)
