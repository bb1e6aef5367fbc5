"""Which versions hvdtrain is tested with. They stand in setup.cfg (python_requires, the extras), nowhere else: what pip
recorded of it when hvdtrain was installed is read here."""

from __future__ import annotations

import importlib.metadata
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?P<range>[^;]*)")
_BOUND = re.compile(r"(?P<sign>==|>=|<=|<|>)\s*(?P<version>[\d.]+)")
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
_SIGNS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Range:
    """Versions such as `>=3.15,<3.16` or `==2.21.0`, as setup.cfg writes them."""

    text: str

    def __contains__(self, version: str) -> bool:
        return all(
            _SIGNS[bound["sign"]](*_padded(version, bound["version"]))
            for bound in _BOUND.finditer(self.text)
        )

    def __str__(self) -> str:
        return self.text.removeprefix("==")


def tested_python() -> Range:
    """The Python versions that hvdtrain was built and run on."""
    try:
        return _range(importlib.metadata.metadata("hvdtrain")["Requires-Python"] or "")
    except importlib.metadata.PackageNotFoundError:
        return Range("")  # Sources that nobody installed: nothing is recorded, nothing is refused.


def tested_range(distribution: str) -> Range:
    """The versions of a distribution that one of hvdtrain's extras asks for; any version if none does."""
    try:
        requirements = importlib.metadata.requires("hvdtrain") or ()
    except importlib.metadata.PackageNotFoundError:
        requirements = ()
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match and match["name"].lower() == distribution:
            return _range(match["range"])
    return Range("")


def version_of(distribution: str) -> str | None:
    """The installed version, from its metadata; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def minor(version: str) -> str:
    """`2.21` of `2.21.0`."""
    return ".".join(version.split(".")[:2])


def _range(text: str) -> Range:
    """The range of pip's record, which sorts bounds in its own way; a reader expects the lower one first."""
    bounds = sorted(_BOUND.findall(text), key=lambda bound: bound[0].startswith("<"))
    return Range(",".join("".join(bound) for bound in bounds))


def _padded(*versions: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two versions as numbers of equal length; what follows the numbers (rc1, +local) does not count."""
    found = (_NUMBERS.match(version) for version in versions)
    first, second = (
        [int(part) for part in match[0].split(".")] if match else [] for match in found
    )
    length = max(len(first), len(second))
    return tuple(first + [0] * (length - len(first))), tuple(second + [0] * (length - len(second)))
