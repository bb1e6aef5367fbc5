"""What cases return, as JSON and arrays: ranks write it, the test process reads it and compares.

A case may return NumPy arrays anywhere in lists and dicts, and `Apart`: values that the test process compares with
those of a reference, so that a test sees how far they are apart. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Apart:
    """How far `found` is from `part` of a reference (see cases/references.py), by one of MEASURES."""

    found: Any
    reference: str
    part: str
    measure: str


def _difference(a: np.ndarray, b: np.ndarray) -> Any:
    return np.abs(a - b)


def _relative(a: np.ndarray, b: np.ndarray) -> Any:
    return np.abs(a - b) / np.maximum(1, np.abs(b))


def _ratio(a: np.ndarray, b: np.ndarray) -> Any:
    return np.abs(a - b) / np.maximum(1e-3, np.abs(b))


MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "difference": _difference,
    "relative": _relative,
    "ratio": _ratio,
}
"""Absolute; relative for values above 1; relative."""


def far(found: Any, wanted: Any, measure: str = "difference") -> float:
    """Return the largest distance between two values of the same structure; nan if there is one.

    Raises:
        AssertionError: their structure differs.
        ValueError: there is nothing in them.
    """
    if isinstance(wanted, dict):
        assert set(found) == set(wanted), (sorted(found), sorted(wanted))
        pairs = [(found[name], wanted[name]) for name in wanted]
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), (len(found), len(wanted))
        pairs = list(zip(found, wanted, strict=True))
    else:
        a, b = np.asarray(found, "float64"), np.asarray(wanted, "float64")
        assert a.shape == b.shape, (a.shape, b.shape)
        return float(np.max(MEASURES[measure](a, b)))
    return float(np.max([far(a, b, measure) for a, b in pairs]))


def write(path: Path, value: Any) -> None:
    """Write a value as NAME.json, last, with its arrays in NAME.npz."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_encoded(value, arrays))
    if arrays:
        np.savez(path.with_suffix(".npz"), allow_pickle=False, **arrays)
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def read(path: Path, references: Path) -> Any:
    """Return what was written, with distances in place of `Apart`."""
    arrays: dict[str, np.ndarray] = {}
    if path.with_suffix(".npz").exists():
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
            arrays = dict(file)
    return _decoded(json.loads(path.read_text()), arrays, references)


def _encoded(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, Apart):
        names = {"reference": value.reference, "part": value.part, "measure": value.measure}
        return {"__apart__": _encoded(value.found, arrays), **names}
    if isinstance(value, dict):
        return {str(name): _encoded(one, arrays) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(one, arrays) for one in value]
    if isinstance(value, np.ndarray):
        name = f"a{len(arrays)}"
        # NumPy has no bfloat16: a file would hold bytes.
        arrays[name] = value if value.dtype.kind != "V" else value.astype("float32")
        return {"__array__": name}
    return value.item() if isinstance(value, np.generic) else value


def _decoded(value: Any, arrays: dict[str, np.ndarray], references: Path) -> Any:
    if isinstance(value, list):
        return [_decoded(one, arrays, references) for one in value]
    if not isinstance(value, dict):
        return value
    if "__array__" in value:
        return arrays[value["__array__"]]
    if "__apart__" in value:
        found = _decoded(value["__apart__"], arrays, references)
        wanted = read(references / f"{value['reference']}.json", references)[value["part"]]
        return far(found, wanted, value["measure"])
    return {name: _decoded(one, arrays, references) for name, one in value.items()}
