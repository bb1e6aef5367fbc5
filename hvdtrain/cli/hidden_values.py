"""Keep the secret in `--env API_KEY=value` out of this process's command line, which everyone can read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.secrets import secret_values


def conceal_secrets(variables: Iterable[EnvVar], arguments: Sequence[str]) -> None:
    """Restart this command with the secret values in its environment, if its command line contains any.

    In that case, this function does not return.

    Args:
        variables: Variables as given by the user.
        arguments: The training script's arguments, at the end of the command line; they stay as they are.
    """
    secrets = secret_values(variables)
    shown = without_values(sys.orig_argv, secrets, len(arguments))
    if shown != sys.orig_argv:
        os.execve(sys.executable, [sys.executable, *shown[1:]], {**os.environ, **secrets})


def without_values(argv: Sequence[str], secrets: Iterable[str], trailing: int) -> list[str]:
    """Return `argv` with `--env NAME` instead of `--env NAME=VALUE` for the names in `secrets`, ignoring the last
    `trailing` arguments."""
    names, end = set(secrets), len(argv) - trailing
    shown = list(argv)
    for at, argument in enumerate(argv[:end]):
        flag, equals, rest = argument.partition("=")
        text = rest if flag == "--env" and equals else argument
        name = text.partition("=")[0]
        given = text is rest or (at > 0 and argv[at - 1] == "--env")
        if given and name in names:
            shown[at] = f"--env={name}" if text is rest else name
    return shown
