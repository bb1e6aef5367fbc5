"""Environment variables that the user wants every rank to have: `--env NAME`, `--env NAME=VALUE`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hvdtrain.environment import FORWARD
from hvdtrain.errors import UsageError
from hvdtrain.rank_variables import is_of_launch

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class EnvVar:
    """One variable for all ranks.

    Attributes:
        name: as in the environment.
        value: its value; None takes the one that it has where the launch starts. It may be a
            secret, so it is not part of `repr`.
    """

    name: str
    value: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """As `--env` takes it."""
        return self.name if self.value is None else f"{self.name}={self.value}"

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise UsageError(
                f"{self.name!r} is no name of an environment variable: use letters, digits and '_'"
            )
        if is_of_launch(self.name):
            raise UsageError(f"{self.name} is set by the launch, for each rank: leave it out")
        if self.value is not None and "\0" in self.value:
            raise UsageError(f"the value of {self.name} contains a NUL byte")


def is_name(text: str) -> bool:
    """Whether a shell takes `text` for the name of a variable. The environment may hold others."""
    return bool(_NAME.fullmatch(text))


def forwarded(environ: Mapping[str, str]) -> frozenset[str]:
    """The names that `--env` asked for, as a launch tells the program that it starts."""
    return frozenset(filter(None, environ.get(FORWARD, "").split(",")))


def parse_variable(text: str) -> EnvVar:
    """The variable of `NAME` or `NAME=VALUE`. Raises UsageError."""
    name, equals, value = text.partition("=")
    return EnvVar(name, value if equals else None)


def without_value(names: Iterable[str], environ: Mapping[str, str]) -> str:
    """What to say of variables that the ranks shall have and that are not set; empty if all are."""
    missing = sorted(set(names) - environ.keys())
    if not missing:
        return ""
    return f"--env {', '.join(missing)}: not set here, so no rank would have it: set it before"
