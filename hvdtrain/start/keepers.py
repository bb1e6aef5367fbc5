"""The launcher's side of the keepers: one ssh to each of the other hosts, as long as the launch."""

from __future__ import annotations

import contextlib
import json
import selectors
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.launch.host_report import HostReport, differences, from_line, late, ssh_problem
from hvdtrain.launch.ssh import ALIVE, BATCH, unseen_keys, where
from hvdtrain.launch.ssh_errors import SSH_FAILED
from hvdtrain.start.keeper import BEAT_SECONDS, GRACE_SECONDS

CONNECT_SECONDS = 10


@dataclass(frozen=True)
class Reach:
    """How other hosts are reached.

    Attributes:
        python: the interpreter there.
        path_variables: what the interpreter needs to be found and to find its modules.
        port, identity_file: for ssh; None leaves it to ssh.
        seconds: within which all hosts must have reported.
    """

    python: str
    path_variables: Mapping[str, str]
    port: int | None
    identity_file: str | None
    seconds: float


def keeper_argv(
    host: str, launch_id: str, reach: Reach, module: str = "hvdtrain.start.keeper"
) -> list[str]:
    """The ssh command that runs a host's keeper (or another program that takes its place)."""
    settings = [f"{name}={value}" for name, value in reach.path_variables.items()]
    remote = ["env", *settings, reach.python, "-P", "-m", module, launch_id]
    return [
        *("ssh", "-T", *BATCH, *ALIVE, *unseen_keys(host, reach.port, reach.identity_file)),
        *("-o", f"ConnectTimeout={max(1, int(min(CONNECT_SECONDS, reach.seconds - 1)))}"),
        *where(reach.port, reach.identity_file),
        *(host, shlex.join(remote)),
    ]


def missing_program(commands: Iterable[Sequence[str]]) -> str:
    """What to say if a program that reaches the other hosts is not here; empty if all are."""
    for program in sorted({command[0] for command in commands}):
        if shutil.which(program) is None:
            return (
                f"{program} reaches the other hosts, and is not in PATH here: install it "
                "(ssh: the package openssh-client), or start where it is"
            )
    return ""


class Keepers:
    """The keepers of a launch. Use as a context manager: at its end nothing is left on any host."""

    def __init__(self, hosts: Sequence[str], launch_id: str, reach: Reach) -> None:
        self._reach = reach
        self._beaten = time.monotonic()
        self._processes = {
            host: subprocess.Popen(
                keeper_argv(host, launch_id, reach),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal is not for them.
            )
            for host in hosts
        }

    def __enter__(self) -> Keepers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        deadline = time.monotonic() + GRACE_SECONDS + 2
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def reports(
        self, variables: Mapping[str, str], own: HostReport
    ) -> tuple[dict[str, HostReport], list[str]]:
        """Bring the variables to every host; returns the reports, and a message a problem."""
        self._say(variables)
        deadline = time.monotonic() + self._reach.seconds
        said = dict.fromkeys(self._processes, b"")
        found: dict[str, HostReport] = {}
        with selectors.DefaultSelector() as selector:
            for host, process in self._processes.items():
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, host)
            while selector.get_map() and (rest := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(rest):
                    host, process = key.data, self._processes[key.data]
                    data = process.stdout.read1() if process.stdout else b""  # type: ignore[attr-defined]
                    said[host] += data
                    *lines, _ = said[host].split(b"\n")
                    report = next(
                        filter(None, (from_line(line.decode(errors="replace")) for line in lines)),
                        None,
                    )
                    if report is not None:
                        found[host] = report
                    if report is not None or not data:
                        selector.unregister(key.fileobj)
        problems = [self._problem(host, found.get(host), own) for host in self._processes]
        return found, [problem for problem in problems if problem]

    def _problem(self, host: str, report: HostReport | None, own: HostReport) -> str:
        if report is not None:
            return differences(host, report, own)
        process = self._processes[host]
        try:
            _, stderr = process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            return late(host, self._reach.seconds)
        text = stderr.decode(errors="replace")
        reach = self._reach
        return ssh_problem(
            host, process.returncode, text, reach.python, reach.port, reach.identity_file
        )

    def warn(self) -> None:
        """Warn the ranks of all other hosts."""
        self._say("warn")

    def beat(self) -> None:
        """Call this every second: the keepers must hear of the launcher."""
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            self._beaten = time.monotonic()
            self._write(b"\n")

    def lost(self) -> list[str]:
        """The hosts to which the connection broke."""
        return [host for host, one in self._processes.items() if one.poll() == SSH_FAILED]

    def end(self) -> None:
        """Have everything of the launch ended on all other hosts; does not wait for it."""
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()

    def _say(self, order: object) -> None:
        self._write(json.dumps(order).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        for process in self._processes.values():
            with contextlib.suppress(OSError, ValueError):
                if process.stdin is not None:
                    process.stdin.write(line)
                    process.stdin.flush()
