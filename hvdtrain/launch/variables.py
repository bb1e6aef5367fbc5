"""Environment variables that the user wants every rank to have: `--env NAME`, `--env NAME=VALUE`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hvdtrain.environment import LAUNCH_ID, LOG_DIR, TERMINAL
from hvdtrain.errors import UsageError
from hvdtrain.strategy_names import STRATEGY

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# What a launch gives each rank itself; a value for all ranks would break it.
_OF_THE_LAUNCH = re.compile(
    r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME|ELASTIC|CONTROLLER|CPU_OPERATIONS"
    r"|GLOO_RENDEZVOUS_.*|GLOO_IFACE)|(OMPI_COMM|PMIX|PMI)_.*"
    rf"|{LAUNCH_ID}|{LOG_DIR}|{TERMINAL}|{STRATEGY}|TF_CONFIG"
)


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
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} is no name of an environment variable: use letters, digits and '_'"
            )
        if _OF_THE_LAUNCH.fullmatch(self.name):
            raise UsageError(f"{self.name} is set by the launch, for each rank: leave it out")
        if self.value is not None and "\0" in self.value:
            raise UsageError(f"the value of {self.name} contains a NUL byte")


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
