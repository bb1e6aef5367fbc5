"""The figures of `hvdtrain bench scaling`, from timings made up by hand."""

import pytest

from hvdtrain.bench.scaling import Pass, Timing, in_step


def test_the_rate_is_the_median_of_the_rounds() -> None:
    # 2 steps of 10 examples: 20/4, 20/2 and 20/1 examples a second.
    assert Timing([[1.0, 3.0], [1.0, 1.0], [0.5, 0.5]], examples=10).rate == 10


def test_in_step_each_step_takes_the_slowest_process() -> None:
    found = in_step([Timing([[1.0, 2.0, 9.0], [1.0]], 10), Timing([[3.0, 1.0], [2.0]], 10)])
    assert found == Timing([[3.0, 2.0], [2.0]], examples=20)


def test_scaling_is_part_of_so_many_plain_processes() -> None:
    one = Pass(plain=100, apart=190, in_step=180, raw=175, ranks=171, size=2)
    assert one.scaling(one.ranks) == pytest.approx(0.855)
