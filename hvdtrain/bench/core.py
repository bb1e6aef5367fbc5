"""One core for each rank that is timed: without it ranks wander, and what is measured is where they happened to be."""

from __future__ import annotations

import os


def take_core(local_rank: int) -> None:
    """Pin this process to the core of its local rank, among those that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
