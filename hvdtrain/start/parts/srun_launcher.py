"""Implementation of `hvdtrain.start.run_srun`: run srun with the environment that horovodrun gives its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import FrameType

from horovod.runner import launch
from horovod.runner.common.util.config_parser import set_env_from_args
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

from hvdtrain.environment import GRACE_SECONDS, HASH_SEED, STATUS_PIPE
from hvdtrain.errors import EngineError
from hvdtrain.launch.addresses import address_towards
from hvdtrain.launch.env_forwarding import forwarded, into_tasks, require_values
from hvdtrain.launch.launchers.srun import STEP_SECONDS
from hvdtrain.launch.running.outcome import how_it_ended
from hvdtrain.launch.running.processes import start
from hvdtrain.launch.running.srun_tasks import BEGIN_SECONDS
from hvdtrain.launch.running.timed_command import ask
from hvdtrain.rank_variables import (
    CONTROLLER,
    CPU_OPERATIONS,
    GLOO_INTERFACE,
    RENDEZVOUS_ADDRESS,
)
from hvdtrain.signals import ending_signals, shell_code
from hvdtrain.standard_streams import write_all
from hvdtrain.start.parts.host_agent import own_report
from hvdtrain.start.parts.output_tags import tell
from hvdtrain.start.parts.rendezvous import Rendezvous

LOOPBACK = "127.0.0.1"
OPEN_MPI = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib"}
"""What horovodrun passes to mpirun for ranks over Open MPI (`horovod.runner.mpi_run`). By default, Open MPI uses UCX
under srun, in which a rank was seen to crash with a segmentation fault."""

ASK_SECONDS = 5.0
"""Time limit for Slurm's answer when the run is ended."""


def launch_tasks(arguments: Sequence[str]) -> int:
    """Launch with the arguments of horovodrun, and return srun's exit code.

    Raises:
        HvdtrainError: The launch cannot start.
    """
    asked = forwarded(os.environ)
    require_values(asked, os.environ)
    sys.argv = ["horovodrun", *arguments]
    options = launch.parse_args()
    environment = into_tasks(os.environ, asked)
    environment.setdefault(HASH_SEED, "0")  # Otherwise each rank starts Python twice, to set it.
    set_env_from_args(environment, options)
    environment |= interfaces(options)
    if options.use_gloo:
        environment |= {CONTROLLER: "gloo", CPU_OPERATIONS: "gloo"}
        environment |= _start_rendezvous(options)
    else:
        environment = OPEN_MPI | environment
    if STATUS_PIPE in os.environ and options.hosts:  # Another launcher may pass no hosts.
        write_all(int(os.environ[STATUS_PIPE]), json.dumps(awaited_tasks(options)).encode() + b"\n")
    return _run(options.command, environment)


def awaited_tasks(options: Namespace) -> dict[str, object]:
    """Return news for `hvdtrain run`: the node of each task, and the seconds after the first for others to begin."""
    places = get_host_assignments(parse_hosts(options.hosts), options.num_proc)
    # Each node may have to fetch the container image before anything runs.
    fetches = any(word.startswith("--container-image=") for word in options.command)
    least = STEP_SECONDS if fetches else BEGIN_SECONDS
    begin = max(least, options.start_timeout or 0)
    return {"tasks": [one.hostname for one in places], "begin": begin}


def interfaces(options: Namespace) -> dict[str, str]:
    """Return the variables with which each library selects the user's network interfaces."""
    if not options.nics:
        return {}
    names = sorted(options.nics)
    every = ",".join(names)
    if options.use_gloo:
        return {GLOO_INTERFACE: names[0], "NCCL_SOCKET_IFNAME": every}
    return {"OMPI_MCA_btl_tcp_if_include": every, "NCCL_SOCKET_IFNAME": every}


def rendezvous_address(options: Namespace, environ: Mapping[str, str]) -> str:
    """Return the address at which the ranks of all nodes reach this machine.

    Raises:
        EngineError: The address cannot be determined.
    """
    wanted = own_report().interfaces if options.nics else {}
    for name in sorted(options.nics or ()):
        if addresses := wanted.get(name):
            return addresses[0]
    nodes = [host.hostname for host in parse_hosts(options.hosts)]
    elsewhere = [node for node in nodes if node != environ.get("SLURMD_NODENAME")]
    if not elsewhere:
        return LOOPBACK
    for name in (elsewhere[0], socket.gethostname()):
        with contextlib.suppress(OSError):
            return address_towards(name)
    raise EngineError(
        f"neither node {elsewhere[0]} nor this machine's own name has an address here: name the network that the "
        "nodes share with --network-interfaces"
    )


def _start_rendezvous(options: Namespace) -> dict[str, str]:
    """Start the rendezvous server, and return the variables that tell the ranks its address."""
    address = rendezvous_address(options, os.environ)
    server = Rendezvous(lambda: address)
    port = server.start()
    server.init(get_host_assignments(parse_hosts(options.hosts), options.num_proc))
    return {RENDEZVOUS_ADDRESS: address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}


def _run(argv: list[str], environment: dict[str, str]) -> int:
    """Run srun, forward signals to it or to its tasks, and return its exit code."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []
    ending: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number in ending_signals():
            ending.append(number)
            if process and len(ending) == 1 and _signal_tasks(process, number):
                return
            # Ends srun, which kills its tasks. On a first SIGINT, it would only ask for a second one.
            number = signal.SIGTERM
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    for number in (*ending_signals(), signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    # Blocked during the start: srun handles a pending signal once it has its handler; earlier, it would be killed.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    process = start(argv, environment, stdin=None, output=None, session=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for missed in early:
        process.send_signal(missed)
    code = process.wait()
    if ending:
        # Otherwise srun's last message would blame the ranks, which it has killed.
        name = signal.Signals(ending[0]).name
        tell(
            f"hvdtrain.start.run_srun (process {os.getpid()}) was sent {name}, and its ranks have ended"
        )
        code = -ending[0]
    elif code < 0:
        how = how_it_ended(shell_code(code))
        tell(f"srun (process {process.pid}), which starts the ranks and waits for them, {how}")
    return shell_code(code)


def _signal_tasks(srun: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal that ends the run to srun's tasks, and end srun after HVDTRAIN_GRACE_SECONDS if they go on.

    Returns:
        Whether the tasks were sent the signal. srun does not forward such signals, but kills its tasks.
    """
    grace = float(os.environ.get(GRACE_SECONDS, 0))
    if not grace:
        return False
    signal.signal(signal.SIGALRM, lambda number, frame: srun.terminate())
    signal.setitimer(signal.ITIMER_REAL, min(grace, threading.TIMEOUT_MAX))
    show = ["scontrol", "--oneliner", "show", "step", os.environ.get("SLURM_JOB_ID", "")]
    # Other steps may run in the job, such as the user's shell.
    started_by = f"SrunHost:Pid={socket.gethostname().partition('.')[0]}:{srun.pid}"
    limit = min(grace, ASK_SECONDS)
    for line in ask(show, limit=limit).answer.splitlines():
        words = line.split()  # The first one is StepId=JOB.STEP.
        if started_by in words:
            order = signal.SIGURG if number == signal.SIGINT else signal.SIGWINCH
            send = ["scancel", f"--signal={order.value}"]  # It knows few signals by name.
            return ask([*send, words[0].partition("=")[2]], limit=limit).returncode == 0
    return False
