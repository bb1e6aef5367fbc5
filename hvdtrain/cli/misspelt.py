"""Variables HVDTRAIN_* that nothing reads: most of them are misspelt, and would be overlooked."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import click

from hvdtrain.environment import SECRET_WORD
from hvdtrain.launch.variables import OWN_NAMES

_PREFIX = "HVDTRAIN_"
# Of the wheels that are built, scripts/setup.sh, and docker/entrypoint.sh.
_OF_SETUP = {"HVDTRAIN_CACHE", "HVDTRAIN_VENV", "HVDTRAIN_SSH_KEYS", "HVDTRAIN_SSH_PORT"}


def unread_variables(command: click.Command, names: Iterable[str]) -> list[str]:
    """A message for each environment variable that looks like one of hvdtrain's, but is not.

    Args:
        command: whose options can be set by variables.
        names: of the environment.
    """
    known = OWN_NAMES | _OF_SETUP
    for option in command.params:
        known |= {name for name in option.envvar or () if name.startswith(_PREFIX)}
    unread = {name for name in names if name.startswith(_PREFIX)} - known
    unread -= {name for name in unread if name.startswith(SECRET_WORD)}
    return [f"{name} is set, but nothing reads it.{_hint(name, known)}" for name in sorted(unread)]


def _hint(name: str, known: Iterable[str]) -> str:
    # Their common beginning would make all of them alike.
    ends = [one.removeprefix(_PREFIX) for one in known]
    close = get_close_matches(name.removeprefix(_PREFIX), sorted(ends), n=1)
    return f" Did you mean {_PREFIX}{close[0]}?" if close else ""
