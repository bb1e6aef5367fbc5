"""LaunchPlan: everything that one launch says, validated when it is made."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.environment import STALL_SHUTDOWN_SECONDS, STALL_WARNING_SECONDS
from hvdtrain.errors import UsageError
from hvdtrain.launch.engine import Controller
from hvdtrain.launch.hosts import Host


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One launch. Raises UsageError for a plan that cannot work.

    Attributes:
        script: the training script; each rank runs it with `python`.
        arguments: the script's own arguments.
        np: number of ranks.
        controller: what Horovod's ranks coordinate through.
        hosts: where the ranks run, filled in this order; empty means this machine.
        python: the interpreter of the ranks.
        start_timeout: seconds that hosts may take to answer; None is Horovod's 30.
        network_interfaces: interfaces to communicate over; empty lets Horovod look for common ones.
        ssh_port, ssh_identity_file: how other hosts are reached; None leaves it to ssh.
        stall_warning_seconds: Horovod warns when some ranks wait this long for the others.
        stall_shutdown_seconds: and ends the job after this; 0 is never.
        verbose: horovodrun says what it does.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    np: int
    controller: Controller
    hosts: tuple[Host, ...] = ()
    python: str = field(default=sys.executable)
    start_timeout: int | None = None
    network_interfaces: tuple[str, ...] = ()
    ssh_port: int | None = None
    ssh_identity_file: Path | None = None
    stall_warning_seconds: int = STALL_WARNING_SECONDS
    stall_shutdown_seconds: int = STALL_SHUTDOWN_SECONDS
    verbose: bool = False

    def __post_init__(self) -> None:
        _check_script(self.script)
        if self.np < 1:
            raise UsageError(f"-np {self.np}: give the number of ranks, at least 1")
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and self.np > slots:
            raise UsageError(
                f"-np {self.np} is more than the {slots} slots of "
                f"{', '.join(map(str, self.hosts))}: lower -np, or give the hosts more slots"
            )
        if self.start_timeout is not None and self.start_timeout < 1:
            raise UsageError(f"--start-timeout {self.start_timeout}: give at least 1 second")
        if self.ssh_port is not None and not 1 <= self.ssh_port <= 65535:
            raise UsageError(f"--ssh-port {self.ssh_port}: a port is a number from 1 to 65535")
        if self.ssh_identity_file is not None and not self.ssh_identity_file.is_file():
            raise UsageError(f"--ssh-identity-file: there is no file {self.ssh_identity_file}")
        if self.stall_warning_seconds < 1:
            raise UsageError(
                f"--stall-warning-seconds {self.stall_warning_seconds}: give at least 1 second"
            )
        if self.stall_shutdown_seconds < 0:
            raise UsageError("--stall-shutdown-seconds: give 0 (never) or a number of seconds")
        if 0 < self.stall_shutdown_seconds <= self.stall_warning_seconds:
            raise UsageError(
                f"--stall-shutdown-seconds {self.stall_shutdown_seconds} must be longer than "
                f"--stall-warning-seconds {self.stall_warning_seconds}, or 0 for never"
            )


def _check_script(script: Path) -> None:
    if script.is_dir():
        raise UsageError(f"{script} is a folder: name the training script")
    if not script.is_file():
        raise UsageError(f"no such script: {script} (in {Path.cwd()})")
    try:
        script.open("rb").close()
    except OSError as error:
        raise UsageError(f"cannot read the script {script}: {error.strerror}") from error
