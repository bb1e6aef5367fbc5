"""Arrays of which only the requested rows are read into memory: on disk (h5py, zarr), or sparse (scipy)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class LazyRows:
    """Rows begin..end of an indexable array; slicing returns a view, and np.asarray reads it.

    np.memmap is not wrapped, as it is a NumPy array with this behaviour.
    """

    array: Any
    begin: int
    end: int
    shape: tuple[int, ...] = field(init=False)
    dtype: np.dtype = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", (self.end - self.begin, *self.array.shape[1:]))
        object.__setattr__(self, "dtype", np.dtype(self.array.dtype))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> LazyRows:
        begin, end, _ = rows.indices(len(self))
        return LazyRows(self.array, self.begin + begin, self.begin + max(begin, end))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(_dense(self.array[self.begin : self.end]), dtype)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return `rows` in that order. They are read in ascending order and once each, as h5py demands."""
        ascending, places = np.unique(rows, return_inverse=True)
        return _dense(self.array[ascending + self.begin])[places]


def as_lazy_rows(value: Any) -> Any:
    """Return `value` as `LazyRows` if it is an array that should not be read as a whole, else unchanged."""
    if _is_sparse(value):
        # Other formats (coo, dia, bsr) cannot be indexed.
        return LazyRows(value.tocsr(), 0, value.shape[0])
    return LazyRows(value, 0, value.shape[0]) if _is_on_disk(value) else value


def is_lazy(value: Any) -> bool:
    """Whether `value` is `LazyRows`, or an array that `as_lazy_rows` would wrap."""
    return isinstance(value, LazyRows) or _is_sparse(value) or _is_on_disk(value)


def _is_on_disk(value: Any) -> bool:
    """Whether `value` has an array's shape, dtype and indexing, but is no array in memory."""
    return (
        not isinstance(value, np.ndarray | np.generic | LazyRows)
        and type(value).__module__.split(".")[0] not in ("pandas", "jax", "jaxlib")
        and hasattr(value, "__getitem__")
        and isinstance(getattr(value, "dtype", None), np.dtype)
        and isinstance(getattr(value, "shape", None), tuple)
        and len(value.shape) > 0
    )


def _is_sparse(value: Any) -> bool:
    return type(value).__module__.startswith("scipy.sparse") and hasattr(value, "tocsr")


def _dense(rows: Any) -> np.ndarray:
    return rows.toarray() if hasattr(rows, "toarray") else np.asarray(rows)
