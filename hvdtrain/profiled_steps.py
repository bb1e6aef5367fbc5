"""The steps of a training to profile: the value of `hvdtrain run --profile`, which ranks read from HVDTRAIN_PROFILE."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import UsageError

PROFILE = "HVDTRAIN_PROFILE"
STEPS = 5
"""Number of steps to profile if only the first is given."""
MOST_STEPS = 200
"""Maximum number of steps: TensorFlow keeps all of their operations in memory."""
_RANGE = re.compile(r"([1-9][0-9]{0,11})(?:-([1-9][0-9]{0,11}))?")


@dataclass(frozen=True)
class ProfiledSteps:
    """A range of steps, counted from 1 since the beginning of the training, over all epochs.

    Attributes:
        first: First step.
        last: Last step; part of the range.
    """

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def parse_steps(text: str) -> ProfiledSteps:
    """Parse FIRST-LAST, or FIRST alone for five steps.

    Raises:
        UsageError: `text` is neither, or asks for too many steps.
    """
    found = _RANGE.fullmatch(text)
    steps = found and ProfiledSteps(int(found[1]), int(found[2] or int(found[1]) + STEPS - 1))
    if not steps or steps.last < steps.first:
        raise UsageError(
            f"{text!r} is not a range of steps: expected FIRST-LAST, such as 100-110, or the first of {STEPS} steps"
        )
    if steps.last - steps.first >= MOST_STEPS:
        raise UsageError(f"{text}: too many steps to profile, at most {MOST_STEPS}")
    return steps


def asked_steps(environ: Mapping[str, str]) -> ProfiledSteps | None:
    """Return the steps in HVDTRAIN_PROFILE; None if it is not set. Raises UsageError if its value is invalid."""
    text = environ.get(PROFILE)
    try:
        return parse_steps(text) if text else None
    except UsageError as error:
        raise UsageError(f"{PROFILE}: {error}") from None
