"""Slurm's compressed lists: whatever Slurm may write is read back as the names it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.launch.slurm.nodelist import expand_counts, expand_nodes

Written = tuple[str, list[str]]
WORDS = st.from_regex(r"[a-z][a-z0-9._-]{0,5}", fullmatch=True)


@st.composite
def numbers(draw: st.DrawFn) -> Written:
    """The inside of a bracket, and the numbers it stands for, padded to one width."""
    width = draw(st.integers(1, 4))
    items, names = [], []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 120))
        last = first + draw(st.integers(0, 12))
        alone = first == last and draw(st.booleans())
        items.append(f"{first:0{width}}" if alone else f"{first:0{width}}-{last:0{width}}")
        pad = len(f"{first:0{width}}")
        names += [f"{number:0{pad}}" for number in range(first, last + 1)]
    return ",".join(items), names


@st.composite
def terms(draw: st.DrawFn) -> Written:
    """One term with up to two brackets: rack[1-2]n[01-03]-ib."""
    text = draw(WORDS)
    names = [text]
    for _ in range(draw(st.integers(0, 2))):
        inside, choices = draw(numbers())
        after = draw(st.one_of(st.just(""), WORDS))
        text += f"[{inside}]{after}"
        names = [name + choice + after for name in names for choice in choices]
    return text, names


@given(st.lists(terms(), min_size=1, max_size=4))
def test_written_lists_are_read_back(written: list[Written]) -> None:
    text = ",".join(text for text, _ in written)
    assert list(expand_nodes(text)) == [name for _, names in written for name in names]


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(1, 9)), min_size=1))
def test_written_counts_are_read_back(runs: list[tuple[int, int]]) -> None:
    text = ",".join(str(n) if times == 1 else f"{n}(x{times})" for n, times in runs)
    assert list(expand_counts(text)) == [n for n, times in runs for _ in range(times)]


@given(st.text(alphabet="an019[]-,x() \n"))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (expand_nodes, expand_counts):
        try:
            assert read(text)
        except UsageError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cpu3", ["cpu3"]),
        ("gpu[01-04,07],cpu3", ["gpu01", "gpu02", "gpu03", "gpu04", "gpu07", "cpu3"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("c[1,3]-ib.site.org", ["c1-ib.site.org", "c3-ib.site.org"]),
    ],
)
def test_lists_of_real_clusters(text: str, names: list[str]) -> None:
    assert list(expand_nodes(text)) == names


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", "a,,b", "a b", "n[1-2", "n]1", "n[]", "n[2-1]", "n[a-b]", "n[1-2:2]"),
        *("n[[1]]", "n[1-99999999]", "n[1-999]m[1-999]"),
    ],
)
def test_wrong_lists_are_quoted(text: str) -> None:
    with pytest.raises(UsageError) as error:
        expand_nodes(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["", "4,", "4(x0)", "4(2)", "x", "-1", "1(x99999999)"])
def test_wrong_counts_are_quoted(text: str) -> None:
    with pytest.raises(UsageError) as error:
        expand_counts(text)
    assert repr(text) in str(error.value)
