"""What the user wants to be run, as a worker of hvdtrain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.launch.program import Program, rank_command
from hvdtrain.launch.variables import EnvVar


@dataclass(frozen=True)
class Script:
    """What the user wants to be run.

    Attributes:
        program: the training script, mostly.
        env: variables for it; a secret has no value here, but in the environment.
    """

    program: Program
    env: tuple[EnvVar, ...] = ()

    @property
    def command(self) -> list[str]:
        return rank_command(self.program)

    @property
    def values(self) -> dict[str, str]:
        """Those of its variables whose values a command may show."""
        return {one.name: one.value for one in self.env if one.value is not None}


def assignments(settings: Mapping[str, str]) -> list[str]:
    """`NAME=VALUE` for each, as env takes them."""
    return [f"{name}={value}" for name, value in settings.items()]
