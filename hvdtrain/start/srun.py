"""Ranks by srun, with all that horovodrun would tell them:

    python -m hvdtrain.start.srun [--env NAME]... -- OPTIONS srun SRUN-OPTIONS COMMAND...

takes the options of horovodrun and leaves to srun what they say about hosts and ssh. Over Gloo,
Horovod's rendezvous server runs in this process, at which the ranks find each other. The ranks get
the same named set of environment variables as those on other hosts by horovodrun do, and what a
session has anyway; it travels inside Slurm's own messages, not in command lines.

Signals go on to srun, which passes SIGUSR1 and SIGUSR2 to every rank and ends the ranks at others.
The exit code is srun's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from types import FrameType

from horovod.runner import launch
from horovod.runner.common.util.config_parser import set_env_from_args
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from hvdtrain.environment import EXIT_SIGNAL_BASE, EXIT_USAGE
from hvdtrain.launch.slurm.task import RENDEZVOUS_PORT, environment_of_srun
from hvdtrain.launch.variables import without_value
from hvdtrain.signals import ending_signals
from hvdtrain.start.task import INTERFACE


def main() -> None:
    split = sys.argv.index("--")
    asked = sys.argv[2:split:2]
    if missing := without_value(asked, os.environ):
        print(f"hvdtrain: {missing}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    sys.argv = ["horovodrun", *sys.argv[split + 1 :]]
    options = launch.parse_args()
    environment = environment_of_srun(dict(os.environ), asked)
    set_env_from_args(environment, options)
    environment |= interfaces(options)
    if options.use_gloo:
        environment |= {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            RENDEZVOUS_PORT: str(_start_rendezvous(options.hosts, options.num_proc)),
        }
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


def _start_rendezvous(hosts: str, np: int) -> int:
    """Start Horovod's server, at which ranks learn each other's addresses; return its port."""
    server = RendezvousServer()
    port: int = server.start()
    server.init(get_host_assignments(parse_hosts(hosts), np))
    return port


def _run(argv: list[str], environment: dict[str, str]) -> int:
    """Run srun; pass signals on; return its exit code."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
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
