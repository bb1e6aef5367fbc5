"""Which versions hvdtrain is tested with. They stand in setup.cfg (python_requires, the extras), nowhere else: what pip
recorded of it when hvdtrain was installed is read here."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Range:
    """Versions such as `>=3.15,<3.16` or `==2.21.0`, as setup.cfg writes them.

    What follows a version's numbers (rc1, +local) does not count.
    """

    text: str

    def __contains__(self, version: str) -> bool:
        try:
            return Version(Version(version).base_version) in SpecifierSet(self.text)
        except InvalidVersion:
            return False

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
    for requirement in map(Requirement, requirements):
        if requirement.name.lower() == distribution:
            return _range(str(requirement.specifier))
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
    return Range(",".join(sorted(text.split(","), key=lambda bound: bound.startswith("<"))))
