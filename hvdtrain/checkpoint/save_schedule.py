"""How often a training writes checkpoints, and how many it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError


@dataclass(frozen=True)
class Checkpoints:
    """When Trainer saves: after each epoch, and within epochs as asked.

    Args:
        every_steps: save after this many training steps within an epoch, too. All ranks count the same steps.
        every_minutes: save when this many minutes have passed since the last checkpoint, too; looked at about once a
            second, between two steps.
        keep: how many checkpoints stay; at least 2, so that one that the disk damaged has one before it.
        max_failures: end the training with an error when this many checkpoints in a row could not be written; None:
            train on, with a warning each time.
        preemption_file: when this file exists on the host of any rank, save and end as on SIGTERM; looked for about
            once a second. For clouds that announce the end of a machine in another way than by a signal.
        mirror: URL of a folder that gets a copy of each checkpoint, in any storage of fsspec (s3://, gs://, file://).
            A run whose run_dir has none as new takes its newest from there. Other files of the run are not copied.

    Raises:
        UsageError: numbers that cannot work.
    """

    every_steps: int | None = None
    keep: int = 2
    every_minutes: float | None = None
    max_failures: int | None = None
    preemption_file: str | Path | None = None
    mirror: str | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise UsageError(
                f"Checkpoints(every_steps={self.every_steps}): pass a number of steps, or leave it out "
                "to save after each epoch"
            )
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise UsageError(
                f"Checkpoints(every_minutes={self.every_minutes}): pass a positive number of minutes, or leave it out "
                "to save after each epoch"
            )
        if self.keep < 2:
            raise UsageError(
                f"Checkpoints(keep={self.keep}): keep at least 2, so that one that the disk has "
                "damaged does not end the run"
            )
        if self.max_failures is not None and self.max_failures < 1:
            raise UsageError(
                f"Checkpoints(max_failures={self.max_failures}): pass a positive number, or leave it out to train on "
                "without new checkpoints"
            )
