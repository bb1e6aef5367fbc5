"""Ranks by srun, with all that horovodrun would tell them:

    python -m hvdtrain.start.srun OPTIONS srun SRUN-OPTIONS COMMAND...

takes the options of horovodrun and leaves to srun what they say about hosts and ssh. Over Gloo,
Horovod's rendezvous server runs in this process, at which the ranks find each other. The ranks get
the same named set of environment variables as those on other hosts by horovodrun do, and what a
session has anyway; it travels inside Slurm's own messages, not in command lines.

Signals go on to srun, which passes SIGUSR1 and SIGUSR2 to every rank and ends the ranks at others.
The exit code is srun's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from types import FrameType

from horovod.runner import launch
from horovod.runner.common.util.config_parser import set_env_from_args
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

from hvdtrain.environment import EXIT_SIGNAL_BASE, EXIT_USAGE, HASH_SEED
from hvdtrain.errors import EngineError
from hvdtrain.launch.slurm.task import (
    RENDEZVOUS_ADDRESS,
    RENDEZVOUS_PORT,
)
from hvdtrain.launch.travel import into_tasks
from hvdtrain.launch.variables import forwarded, without_value
from hvdtrain.signals import ending_signals
from hvdtrain.start.agent import own_report
from hvdtrain.start.rendezvous import Rendezvous
from hvdtrain.start.task import INTERFACE

LOOPBACK = "127.0.0.1"


def main() -> None:
    asked = forwarded(os.environ)
    if missing := without_value(asked, os.environ):
        print(f"hvdtrain: {missing}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    sys.argv[0] = "horovodrun"
    options = launch.parse_args()
    environment = into_tasks(os.environ, asked)
    environment.setdefault(HASH_SEED, "0")  # Else each rank starts Python twice, to set it.
    set_env_from_args(environment, options)
    environment |= interfaces(options)
    if options.use_gloo:
        environment |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        try:
            environment |= _start_rendezvous(options)
        except EngineError as error:
            print(f"hvdtrain: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
    sys.exit(_run(options.command, environment))


def interfaces(options: Namespace) -> dict[str, str]:
    """Where the ranks communicate if the user said so, in the words of each library."""
    if not options.nics:
        return {}
    names = sorted(options.nics)
    every = ",".join(names)
    if options.use_gloo:
        return {INTERFACE: names[0], "NCCL_SOCKET_IFNAME": every}
    return {"OMPI_MCA_btl_tcp_if_include": every, "NCCL_SOCKET_IFNAME": every}


def rendezvous_address(options: Namespace, environ: Mapping[str, str]) -> str:
    """The address of this machine at which the ranks of all nodes reach it.

    Raises:
        EngineError: its network does not tell.
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
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # Sends nothing: it asks the kernel for the route.
            address = str(probe.getsockname()[0])
            return address
    raise EngineError(
        f"neither node {elsewhere[0]} nor this machine's own name has an address here: name the network that the "
        "nodes share with --network-interfaces"
    )


def _start_rendezvous(options: Namespace) -> dict[str, str]:
    """Start the server at which ranks learn each other's addresses; return what tells them where it is."""
    address = rendezvous_address(options, os.environ)
    server = Rendezvous(lambda: address)
    port = server.start()
    server.init(get_host_assignments(parse_hosts(options.hosts), options.num_proc))
    return {RENDEZVOUS_ADDRESS: address, RENDEZVOUS_PORT: str(port)}


def _run(argv: list[str], environment: dict[str, str]) -> int:
    """Run srun; pass signals on; return its exit code."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        # At a first SIGINT srun only asks for a second one.
        number = signal.SIGTERM if number == signal.SIGINT else number
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    for number in (*ending_signals(), signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    # srun takes a signal that came before it listens, where it would be ended by one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    try:
        process = subprocess.Popen(argv, env=environment)
    except OSError as error:
        print(f"srun: cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        return 127
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for missed in early:
        process.send_signal(missed)
    code = process.wait()
    return code if code >= 0 else EXIT_SIGNAL_BASE - code


if __name__ == "__main__":
    main()
