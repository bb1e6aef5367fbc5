"""Nested structures of arrays: dicts, lists and tuples whose leaves have the same first dimension.

Keras names several inputs or outputs this way. All functions here are pure functions of NumPy leaves.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.data.rows import LazyRows
from hvdtrain.errors import UsageError

PARTS = ("x", "y", "sample_weight")
"""Names of the parts of a data tuple, in messages."""

CHECKSUM_BYTES = 1 << 15
"""Maximum number of bytes of one array that enter a checksum."""

SAMPLED = 64
"""Maximum number of values of one array that ranks compare before they start."""


class Spec(NamedTuple):
    """The signature of one leaf.

    Attributes:
        shape: Shape without the leading dimension; None for a dimension that varies.
        dtype: Name of the dtype.
    """

    shape: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if n is None else str(n) for n in self.shape)}]"


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to corresponding leaves of structures of the same form."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, tree[key], *(o[key] for o in others)) for key in tree}
    if isinstance(tree, list | tuple):
        mapped = [map_leaves(function, *items) for items in zip(tree, *others, strict=True)]
        if hasattr(tree, "_fields"):
            return type(tree)(*mapped)
        return mapped if isinstance(tree, list) else tuple(mapped)
    return function(tree, *others)


def named_leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves with the path to each, as a user would write it: `x['image']`, `y[1]`."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_leaves(value, f"{name}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from named_leaves(value, f"{name}[{index}]")
    else:
        yield name, tree


def part_names(data: tuple) -> Sequence[str]:
    """Return the names of the parts of a data tuple; one of more than three parts is for a custom train_step."""
    return PARTS if len(data) <= len(PARTS) else [f"batch[{i}]" for i in range(len(data))]


def named_parts(data: tuple) -> list[tuple[str, Any]]:
    """Return all leaves of a data tuple (x[, y[, sample_weight]]) with their names."""
    return [
        pair
        for part, tree in zip(part_names(data), data, strict=False)
        for pair in named_leaves(tree, part)
    ]


def count_examples(data: tuple, where: str = "the data") -> int:
    """Return the length of the first dimension, which all leaves share; `where` names the data in messages.

    Raises:
        UsageError: If the lengths differ; names each part and its length.
    """
    lengths = {name: leaf.shape[0] for name, leaf in named_parts(data)}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(
            f"{where}: the arrays have different numbers of examples: {listed}. Each array needs one entry "
            "per example."
        )
    return next(iter(lengths.values()))


def cut(tree: Any, begin: int, end: int) -> Any:
    """Return examples begin..end, as views."""
    return map_leaves(lambda leaf: leaf[begin:end], tree)


def read(tree: Any) -> Any:
    """Return the structure with NumPy arrays: arrays that are on disk or sparse are read into memory."""
    return map_leaves(np.asarray, tree)


def is_bare(element: Any) -> bool:
    """Whether a signature (see `Source.element`) is that of x alone."""
    return isinstance(element, Spec) or not isinstance(element, tuple)


def as_given(data: tuple, bare: bool) -> Any:
    """Return what Keras passes to train_step: x itself in place of (x,) if the user passed it so."""
    return data[0] if bare else data


def take(tree: Any, rows: np.ndarray) -> Any:
    """Return the examples at the indices `rows`, in that order, as new arrays."""
    return map_leaves(
        lambda leaf: leaf.take(rows) if isinstance(leaf, LazyRows) else np.take(leaf, rows, axis=0),
        tree,
    )


def concatenate(trees: Sequence[Any]) -> Any:
    """Join structures of the same form along the examples; a single one is returned as it is."""
    if len(trees) == 1:
        return trees[0]
    return map_leaves(lambda *leaves: np.concatenate(leaves), *trees)


def cast_floats(tree: Any, dtype: str) -> Any:
    """Cast floating-point leaves to `dtype`, as Keras does with arrays; no copy if a leaf has it already."""
    return map_leaves(
        lambda leaf: leaf.astype(dtype, copy=False) if leaf.dtype.kind == "f" else leaf, tree
    )


def spec(tree: Any, float_dtype: str | None = None) -> Any:
    """Return the structure with a `Spec` for each leaf; floating-point leaves get `float_dtype`, if given."""

    def of(leaf: np.ndarray) -> Spec:
        is_float = leaf.dtype.kind == "f"
        return Spec(leaf.shape[1:], float_dtype if float_dtype and is_float else leaf.dtype.name)

    return map_leaves(of, tree)


def common_spec(one: Any, other: Any) -> Any:
    """Return the signature `one` with None for each dimension that differs in `other`."""
    if isinstance(one, Spec):
        if not isinstance(other, Spec) or len(one.shape) != len(other.shape):
            return one
        pairs = zip(one.shape, other.shape, strict=True)
        return Spec(tuple(a if a == b else None for a, b in pairs), one.dtype)
    if isinstance(one, dict):
        return {key: common_spec(item, other.get(key)) for key, item in one.items()}
    items = [common_spec(a, b) for a, b in zip(one, other, strict=False)]
    return items if isinstance(one, list) else tuple(items)


def varies(element: Any) -> bool:
    """Whether some dimension of a signature varies."""
    if isinstance(element, Spec):
        return None in element.shape
    return any(map(varies, element.values() if isinstance(element, dict) else element))


def sample(tree: Any) -> dict[str, list[float | str]]:
    """Return at most SAMPLED evenly spaced values of each leaf: floats, or strings for anything else."""
    return {name: [_plain(v) for v in _spaced(leaf)] for name, leaf in named_parts(tree)}


def _spaced(leaf: np.ndarray) -> np.ndarray:
    if isinstance(leaf, LazyRows):
        places = np.linspace(0, len(leaf) - 1, min(len(leaf), SAMPLED)).astype(np.int64)
        rows = leaf.take(places).reshape(len(places), -1)
        return rows[np.arange(len(places)), np.arange(len(places)) % rows.shape[1]]
    places = np.linspace(0, leaf.size - 1, min(leaf.size, SAMPLED)).astype(np.int64)
    return leaf.flat[places]  # Copies nothing else, whatever the array's memory layout.


def _plain(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def checksum(tree: Any, start: int = 0) -> int:
    """Return a CRC-32 of at most CHECKSUM_BYTES evenly spaced bytes of each leaf, and its shape, continuing `start`.

    It notices streams that differ in order, augmentation or length, at a cost that does not grow with the batch. It
    does not notice a change of a few bytes in a large batch.
    """
    value = start
    for name, leaf in named_leaves(tree, ""):
        value = zlib.crc32(f"{name}{leaf.shape}{leaf.dtype}".encode(), value)
        value = zlib.crc32(_sample(leaf), value)
    return value


def _sample(leaf: np.ndarray) -> bytes:
    limit = max(1, CHECKSUM_BYTES // max(1, leaf.dtype.itemsize))
    step = -(-leaf.size // limit) or 1
    # An odd step does not hit the same column each time in images with an even number of columns.
    step += step > 1 and step % 2 == 0
    flat = leaf.reshape(-1)[::step]
    if leaf.dtype.hasobject:
        return repr(flat.tolist()).encode()
    return flat.tobytes()
