"""The order in which a stage runs the forward and backward passes of a step's micro-batches.

1F1B (one forward, one backward; PipeDream-Flush: Narayanan et al., "Efficient large-scale language model
training on GPU clusters using Megatron-LM", 2021): a stage runs ahead by as many forward passes as there are
stages after it, then alternates, so that at most `stages - stage` micro-batches wait for their backward pass,
however many there are. With m micro-batches and s stages of equal times, a step takes (m + s - 1) / m times as
long as if no stage ever waited. Losses that are divided by a count over all micro-batches need another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Pass(Enum):
    """A direction through the model."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Action:
    """A pass of one micro-batch, counted from 0, through one stage."""

    kind: Pass
    micro_batch: int


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Yield the passes of stage `stage` of `stages` in a training step, in order."""
    assert 0 <= stage < stages and micro_batches >= 1, (stage, stages, micro_batches)
    ahead = min(stages - 1 - stage, micro_batches)
    for micro_batch in range(ahead):
        yield Action(Pass.FORWARD, micro_batch)
    for micro_batch in range(ahead, micro_batches):
        yield Action(Pass.FORWARD, micro_batch)
        yield Action(Pass.BACKWARD, micro_batch - ahead)
    for micro_batch in range(micro_batches - ahead, micro_batches):
        yield Action(Pass.BACKWARD, micro_batch)


def all_forward_then_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Yield the passes of any stage where no loss is known before all micro-batches have been forward.

    GPipe's order (Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism",
    2019): it takes the same time as 1F1B, but all micro-batches wait for their backward pass at once.
    """
    assert 0 <= stage < stages and micro_batches >= 1, (stage, stages, micro_batches)
    for kind in Pass:
        for micro_batch in range(micro_batches):
            yield Action(kind, micro_batch)
