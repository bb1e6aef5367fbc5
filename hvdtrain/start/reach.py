"""How a program is run on another host: the ssh command, and what must be here for it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.launch.ssh import ALIVE, BATCH, unseen_keys, where

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


def agent_argv(host: str, launch_id: str, reach: Reach) -> list[str]:
    """The ssh command that runs a host's agent."""
    settings = [f"{name}={value}" for name, value in reach.path_variables.items()]
    remote = ["env", *settings, reach.python, "-P", "-m", "hvdtrain.start.agent", launch_id]
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
