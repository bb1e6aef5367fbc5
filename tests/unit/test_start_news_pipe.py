"""News of the ranks for a reader that is behind: whole lines, and none lost that is told only once."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from hvdtrain.start.parts.news_pipe import NewsPipe


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    yield ends
    for end in ends:
        with suppress(OSError):
            os.close(end)


@pytest.mark.parametrize("length", [100, 10_000, 200_000])
def test_what_is_told_once_arrives_when_the_reader_goes_on(
    pipe: tuple[int, int], length: int
) -> None:
    news = NewsPipe(pipe[1])
    for number in range(2000):
        news.send({"ranks": [number, "x" * length]})
    for host in ("a", "b"):
        news.send({"without": host}, once=True)
    assert len(news._waiting) < 2 * length + 100  # Nothing piles up.
    lines: list[Any] = []
    taken = b""
    while not lines or lines[-1] != {"ranks": "last"}:
        taken += os.read(pipe[0], 65536)
        news.send({"ranks": "last"})
        *whole, taken = taken.split(b"\n")
        lines += map(json.loads, whole)
    told = [line["without"] for line in lines if "without" in line]
    assert told == ["a", "b"]
    numbers = [line["ranks"][0] for line in lines if len(line.get("ranks", "")) == 2]
    assert numbers == list(range(len(numbers))) and 0 < len(numbers) < 2000


def test_nobody_reads(pipe: tuple[int, int]) -> None:
    NewsPipe(None).send({"ranks": []}, once=True)
    os.close(pipe[0])
    news = NewsPipe(pipe[1])
    news.send({"ranks": []})
    news.send({"left": "name"}, once=True)
    assert not news._waiting
