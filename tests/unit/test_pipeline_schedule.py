"""The schedules: order, how much waits, and that stages never wait for each other for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.parallel.pipeline.schedule import (
    Action,
    Pass,
    all_forward_then_backward,
    one_forward_one_backward,
)

Schedule = Callable[[int, int, int], Iterator[Action]]
SIZES = (st.integers(1, 6), st.integers(1, 12))
SCHEDULES = st.sampled_from([one_forward_one_backward, all_forward_then_backward])


def short(stage: int, stages: int, micro_batches: int) -> str:
    actions = one_forward_one_backward(stage, stages, micro_batches)
    return " ".join(f"{action.kind.value[0].upper()}{action.micro_batch}" for action in actions)


def test_order() -> None:
    # The figure of the paper for 4 stages, 5 micro-batches.
    assert short(3, 4, 5) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    assert short(2, 4, 5) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert short(0, 4, 5) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"


def test_fewer_micro_batches_than_stages() -> None:
    assert short(0, 4, 2) == "F0 F1 B0 B1"


def test_no_backward_pass_before_the_last_forward_pass() -> None:
    for stage in range(3):
        actions = all_forward_then_backward(stage, 3, 4)
        kinds = "".join(action.kind.value[0] for action in actions)
        assert kinds == "ffffbbbb"


@given(SCHEDULES, *SIZES)
def test_each_micro_batch_passes_once_each_way_in_order(
    schedule: Schedule, stages: int, micro_batches: int
) -> None:
    for stage in range(stages):
        actions = list(schedule(stage, stages, micro_batches))
        for kind in Pass:
            numbers = [a.micro_batch for a in actions if a.kind is kind]
            assert numbers == list(range(micro_batches))


@given(*SIZES)
def test_few_micro_batches_wait(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        waiting = most = 0
        for action in one_forward_one_backward(stage, stages, micro_batches):
            waiting += 1 if action.kind is Pass.FORWARD else -1
            most = max(most, waiting)
        assert most == min(stages - stage, micro_batches)


def finish_times(schedule: Schedule, stages: int, micro_batches: int) -> list[int]:
    """Run all stages, each action taking one unit; return when each stage ends. Sending never waits."""
    todo = [deque(schedule(s, stages, micro_batches)) for s in range(stages)]
    done: dict[tuple[int, Action], int] = {}
    clock = [0] * stages
    while any(todo):
        moved = False
        for stage, actions in enumerate(todo):
            while actions:
                action = actions[0]
                neighbour = stage - 1 if action.kind is Pass.FORWARD else stage + 1
                if 0 <= neighbour < stages:
                    if (neighbour, action) not in done:
                        break
                    clock[stage] = max(clock[stage], done[neighbour, action])
                clock[stage] += 1
                done[stage, actions.popleft()] = clock[stage]
                moved = True
        assert moved, "every stage waits for another"
    return clock


@given(SCHEDULES, *SIZES)
def test_no_stage_waits_for_ever_and_the_bubble_is_the_smallest(
    schedule: Schedule, stages: int, micro_batches: int
) -> None:
    # Forward and backward pass of one unit each: 2 m of work, 2 (s - 1) of waiting.
    longest = max(finish_times(schedule, stages, micro_batches))
    assert longest == 2 * (micro_batches + stages - 1)
