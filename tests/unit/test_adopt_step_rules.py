"""Which rules explain a step on a whole batch by the steps on its shares."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.adopt.step_arguments import StepArguments
from hvdtrain.adopt.step_rules import chosen, output_rules, same_gradients, state_rules
from hvdtrain.runtime import Rank


def of(*values: float) -> list[np.ndarray]:
    return [np.asarray(value, np.float32) for value in values]


@pytest.mark.parametrize(
    ("whole", "shares", "rules"),
    [
        (3.0, (2.0, 4.0), {"mean"}),
        (6.0, (2.0, 4.0), {"sum"}),
        (2.0, (2.0, 2.0), {"same", "mean"}),
        (0.0, (0.0, 0.0), {"same", "mean", "sum"}),
        (5.0, (2.0, 4.0), set()),
        (3.0, (2.0, 4.0 + 1e-4), {"mean"}),
        (np.nan, (np.nan, np.nan), {"same", "mean", "sum"}),
    ],
)
def test_a_result(whole: float, shares: tuple[float, ...], rules: set[str]) -> None:
    assert output_rules(*of(whole), of(*shares)) == rules


def test_rows_of_the_shares_follow_each_other() -> None:
    whole = np.arange(8).reshape(4, 2)
    assert output_rules(whole, [whole[:2], whole[2:]]) == {"rows"}
    assert output_rules(whole, [whole[2:], whole[:2]]) == set()
    names = np.array([b"a", b"b"], object)
    assert output_rules(names, [names[:1], names[1:]]) == {"rows"}


@pytest.mark.parametrize(
    ("before", "whole", "shares", "rules"),
    [
        (10.0, 16.0, (12.0, 14.0), {"sum"}),
        (10.0, 13.0, (12.0, 14.0), {"mean"}),
        (10.0, 9.0, (9.0, 9.0), {"same", "mean"}),
        (10.0, 10.0, (10.0, 10.0), {"same", "mean", "sum"}),
        (10.0, 11.0, (10.0, 10.0), set()),
        # A change in the last bit of a large value counts for nothing.
        (1e4, 1e4, (1e4 + 1e-3, 1e4), {"same", "mean", "sum"}),
    ],
)
def test_a_variable(
    before: float, whole: float, shares: tuple[float, ...], rules: set[str]
) -> None:
    assert state_rules(*of(before, whole), of(*shares)) == rules


def test_whole_numbers_and_flags_are_compared_exactly() -> None:
    numbers = [np.int64(one) for one in (7, 9)]
    assert state_rules(np.int64(5), np.int64(11), numbers) == {"sum"}
    flags = [np.bool_(True), np.bool_(True)]
    assert state_rules(np.bool_(False), np.bool_(True), flags) == {"same"}
    assert state_rules(np.bool_(False), np.bool_(False), flags) == set()


@pytest.mark.parametrize(
    ("rules", "is_weight", "rule"),
    [
        ({"sum"}, False, "sum"),
        ({"same", "mean"}, True, "same"),
        ({"same", "mean"}, False, "mean"),
        ({"same", "mean", "sum"}, True, None),
        ({"rows", "same"}, True, None),
        (set(), True, None),
    ],
)
def test_only_one_rule_is_relied_upon(rules: set[str], is_weight: bool, rule: str | None) -> None:
    assert chosen(rules, is_weight) == rule


def test_gradients_may_differ_by_the_rounding_of_the_largest() -> None:
    whole = of(100.0, 0.0)
    assert same_gradients(whole, of(100.01, 1e-5))
    assert not same_gradients(whole, of(100.2, 0.0))
    assert not same_gradients(whole, of(100.0, 1e-2))


def test_a_share_has_its_rows_of_all_that_has_as_many_as_the_batch() -> None:
    x, table = tf.reshape(tf.range(8.0), (4, 2)), np.ones(3)
    arguments = StepArguments.of((x, table), {"y": np.arange(4), "training": True})
    assert arguments.examples == 4
    (mine, whole), named = arguments.share(Rank(1, 2, 1, 2))
    np.testing.assert_array_equal(mine, [[4, 5], [6, 7]])
    np.testing.assert_array_equal(named["y"], [2, 3])
    assert whole is table and named["training"] is True


def test_arguments_that_tensorflow_traces_once_have_one_signature() -> None:
    def signature(rows: int, flag: bool = True) -> tuple[object, ...]:
        return StepArguments.of((np.ones((rows, 2)),), {"flag": flag}).signature

    assert signature(4) == signature(4)
    assert signature(4) != signature(6)
    assert signature(4) != signature(4, False)
    assert StepArguments.of((), {}).examples == 0
