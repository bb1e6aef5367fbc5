"""What ranks send each other comes back as it was: types, keys, bits; or is refused by name."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.encoding import decode, encode
from hvdtrain.errors import UsageError
from hvdtrain.runtime import start_horovod


class Point(NamedTuple):
    x: int


VALUES: list[Any] = [
    None,
    True,
    10**30,
    -0.0,
    1e-320,
    math.inf,
    "\udc80 \x00 ü",
    b"",
    b"\x00\xff{}",
    [],
    (),
    [1, (2, [3, ()])],
    {0: [1, 2]},
    {0: "a", "0": "b", 1.5: "c", None: "d", (1, b"k"): "e"},
    {False: 0, 2: True},
    {"tuple": [1], "dict": {"array": 1}},
    {1, "a"},
    frozenset([(1, 2)]),
    {"nested": [{(0, 1): {"deep": (b"x", np.float32(0.1))}}]},
]
ARRAYS = [
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.asfortranarray(np.random.default_rng(0).normal(size=(3, 4))),
    np.array(3.0),
    np.zeros((0, 3), "float32"),
    np.array([True, False]),
    np.array([1 + 2j]),
    np.array(["a", "ünï"]),
    np.array([b"raw"]),
    np.array(["2024-01-01"], "datetime64[D]"),
    tf.constant([1.5, -2.0], tf.bfloat16).numpy(),
    np.array([np.nan, -0.0, np.inf]),
    np.int64(7),
    np.float32(0.1),
    np.bool_(True),
    np.str_("text"),
]


def alike(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return alike([*one.items()], [*other.items()])
    if isinstance(one, set | frozenset):
        return one == other and {type(v) for v in one} == {type(v) for v in other}
    if isinstance(one, np.ndarray | np.generic):
        same = (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        return same and (not isinstance(one, np.ndarray) or other.flags.writeable)
    return repr(one) == repr(other)


def name_of(value: Any) -> str:
    # A set's order is another in each process that pytest-xdist starts.
    return repr(sorted(value, key=repr) if isinstance(value, set) else value)


@pytest.mark.parametrize(
    "value", [*VALUES, *ARRAYS, {"all": [*ARRAYS, b"between", *ARRAYS]}], ids=name_of
)
def test_there_and_back(value: Any) -> None:
    assert alike(decode(encode(value)), value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "it is a builtins.object"),
        ({"a": [1, lambda: 0]}, "['a'][1] is a builtins.function"),
        ({"a": {Point(1): 2}}, "['a'] key Point(x=1) is a test_encoding.Point"),
        ([OrderedDict(a=1)], "[0] is a collections.OrderedDict"),
        (Counter("a"), "it is a collections.Counter"),
        ([tf.constant(1)], "[0] is a tensorflow."),
        ([np.array([None])], "[0] is an array of dtype object"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
        (np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]), "it is an array of dtype [('a'"),
        (10**5000, "digits"),
    ],
    ids=range(10),
)
def test_what_is_refused(value: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        encode(value)
    assert said in str(error.value)


def test_what_contains_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="contains itself"):
        encode(endless)


def test_the_whole_message() -> None:
    start_horovod()
    said = r"^state: rank 0 cannot send this .*: it is a builtins.object. Send numbers"
    with pytest.raises(UsageError, match=said):
        ALL_RANKS.exchange(object(), "state")
