"""Data in memory: NumPy arrays, and whatever turns into them without a copy.

Only the rank's own examples are copied, or none without shuffling. Arrays on disk (np.memmap, h5py) stay there, and
sparse arrays stay sparse, except for the rows of a step.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from hvdtrain.data import structures
from hvdtrain.data.class_weight import apply_class_weight
from hvdtrain.data.indexed import KnownSource, Slot
from hvdtrain.data.rows import LazyRows, as_lazy_rows, is_lazy
from hvdtrain.data.share import ReadOptions, Share
from hvdtrain.errors import UsageError

SCALARS = (bool, int, float, complex, str, bytes, np.generic)
UNSUPPORTED = ("RaggedTensor", "SparseTensor")


@dataclass(frozen=True, eq=False, kw_only=True)
class ArraySource(KnownSource):
    """Arrays as a `Source`.

    Attributes:
        data: Data tuple (x[, y[, sample_weight]]) of converted arrays.
        bare: Whether the user passed x alone, not (x,).
    """

    data: tuple
    bare: bool

    @property
    def element(self) -> Any:
        return structures.as_given(structures.spec(self.data, self.reading.float_dtype), self.bare)

    def sample(self) -> dict[str, list[float | str]]:
        return structures.sample(self.data)

    def _shares(self, slots: Sequence[Slot]) -> Iterator[Share]:
        order = self.order(self.pass_length)
        for slot in slots:
            rows = order.rows(slot.begin, slot.end)
            data = (
                structures.read(structures.cut(self.data, rows.start, rows.stop))
                if isinstance(rows, slice)
                else structures.take(self.data, rows)
            )
            data = structures.cast_floats(data, self.reading.float_dtype)
            yield slot.share(structures.as_given(data, self.bare))


def array_source(data: tuple, reading: ReadOptions) -> ArraySource:
    """Check and convert (x[, y[, sample_weight]]), and return its source.

    Raises:
        UsageError: If there are no examples, a part is not an array, lengths differ, or class weights do not fit.
    """
    data = convert(data)
    _require_weights_like_labels(data)
    count = structures.count_examples(data)
    if count == 0:
        raise UsageError("the data is empty: its arrays have length 0.")
    # Now and not share by share, so that labels that do not fit are an error on every rank, before the first step.
    data = apply_class_weight(data, reading, "the data")
    bare = len(data) == 1 and not isinstance(data[0], list | tuple)
    return ArraySource(data=data, pass_length=count, reading=reading, bare=bare)


def unpack(x: Any, y: Any = None, sample_weight: Any = None) -> tuple:
    """Return what was passed to fit as a data tuple: (x,), (x, y) or (x, y, sample_weight).

    Args:
        x: Data, or such a tuple. A list means several inputs, never a data tuple.
        y: Labels, if any.
        sample_weight: Weights of the examples, if any.

    Raises:
        UsageError: If there is no x, weights come without y or twice, or the tuple has another length.
    """
    parts = [x, y, sample_weight]
    if isinstance(x, tuple) and y is None:
        if not 1 <= len(x) <= 3:
            raise UsageError(
                f"x is a tuple of {len(x)} items; a tuple means (x, y) or (x, y, sample_weight). "
                "Pass several inputs as a list or a dict."
            )
        if sample_weight is not None and len(x) == 3 and x[2] is not None:
            raise UsageError("sample_weight was passed twice: on its own, and in the tuple x.")
        parts[: len(x)] = x
        parts[2] = sample_weight if sample_weight is not None else parts[2]
    if parts[0] is None:
        raise UsageError("there is no data: x is None.")
    if parts[1] is None and parts[2] is not None:
        raise UsageError("sample_weight was passed without y: there is no loss for it to weight.")
    while parts[-1] is None:
        parts.pop()
    return tuple(parts)


def convert(data: tuple) -> tuple:
    """Return the data tuple with each leaf a NumPy array, or `LazyRows`, of at least one dimension.

    Tensors, DataFrames and numbers in lists become arrays. NumPy arrays are left as they are, and arrays that are on
    disk or sparse stay so until their rows are needed.

    Raises:
        UsageError: If a part is not an array; names it.
    """
    given = data[:2] if len(data) == 3 else data
    names = structures.part_names(data)
    parts = [_convert(tree, name) for name, tree in zip(names, given, strict=False)]
    if len(data) == 3:
        weights = _filled(data[2], structures.count_examples(tuple(parts)))
        parts.append(_convert(weights, structures.PARTS[2]))
    return tuple(parts)


def _require_weights_like_labels(data: tuple) -> None:
    """Raise UsageError unless sample weights are one array, or one for each of several arrays in y."""
    if len(data) < 3 or not isinstance(data[2], dict | list | tuple):
        return
    labels, weights = ([name for name, _ in structures.named_leaves(part, "")] for part in data[1:])
    if len(labels) > 1 and sorted(labels) != sorted(weights):
        raise UsageError(
            f"sample_weight has {', '.join(weights)}, and y has {', '.join(labels)}: pass weights, or None, for each "
            "array in y and in the same structure, or one array for all of them."
        )


def _filled(weights: Any, examples: int) -> Any:
    """Replace each None in `weights`, an output whose examples all count the same, by an array of ones."""
    if weights is None:
        return np.ones(examples, np.float32)
    if isinstance(weights, dict):
        return {key: _filled(item, examples) for key, item in weights.items()}
    if isinstance(weights, list | tuple) and not _is_numbers(weights):
        filled = [_filled(item, examples) for item in weights]
        return filled if isinstance(weights, list) else tuple(filled)
    return weights


def validation_split(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[tuple, tuple]:
    """Split arrays into (training, validation) data tuples: validation gets the last examples, before shuffling.

    Both are views. Only arrays can be split: a stream would have to be read to its end first.

    Args:
        x: As in `unpack`.
        y: As in `unpack`.
        sample_weight: As in `unpack`.
        fraction: Fraction of the examples for validation, between 0 and 1.

    Raises:
        UsageError: If `fraction` is out of range, x is not arrays, or either part would be empty.
    """
    if not (isinstance(fraction, Real) and 0 < fraction < 1):
        raise UsageError(f"validation_split is {fraction!r}; it must lie between 0 and 1.")
    if not is_arrays(x):
        raise UsageError(
            f"validation_split works with arrays only; x is a {type(x).__name__}. "
            "Pass validation_data instead."
        )
    data = convert(unpack(x, y, sample_weight))
    count = structures.count_examples(data)
    kept = int(count * (1.0 - fraction))
    if kept in (0, count):
        raise UsageError(
            f"validation_split {fraction} of {count} examples leaves nothing to "
            f"{'train on' if kept == 0 else 'validate with'}. Use more data or another fraction."
        )
    return structures.cut(data, 0, kept), structures.cut(data, kept, count)


def is_arrays(value: Any) -> bool:
    """Whether `value` is meant as arrays in memory, even faulty ones, and not as a stream."""
    return (
        isinstance(value, (dict, list, tuple, *SCALARS))
        or hasattr(value, "__array__")
        or type(value).__name__ in UNSUPPORTED
        or is_lazy(value)
    )


def _convert(value: Any, name: str) -> Any:
    if isinstance(value, dict) and value:
        return {key: _convert(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple) and value and not _is_numbers(value):
        items = [_convert(item, f"{name}[{index}]") for index, item in enumerate(value)]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)
    return to_array(value, name)


def _is_numbers(value: Any) -> bool:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, SCALARS)


def to_array(value: Any, name: str) -> np.ndarray | LazyRows:
    """Convert one leaf as `convert` does.

    Args:
        value: Leaf to convert.
        name: Name of the leaf in messages.

    Raises:
        UsageError: If it is not a dense array of numbers or strings with an example dimension; names the leaf.
    """
    if value is None:
        raise UsageError(f"{name} is None. Leave it out of the structure, or pass an array.")
    if isinstance(value, dict | list | tuple) and not value:
        raise UsageError(f"{name} is an empty {type(value).__name__}: there is no data in it.")
    value = as_lazy_rows(value)
    if isinstance(value, LazyRows):
        return value
    is_array = hasattr(value, "__array__") and type(value).__name__ not in UNSUPPORTED
    if not is_array and not isinstance(value, (list, tuple, *SCALARS)):
        raise UsageError(
            f"{name} is a {type(value).__name__}, not an array. Pass a dense NumPy array or tensor (a ragged "
            "or sparse one: call to_tensor or to_dense)."
        )
    try:
        array = _from_pandas(value, name)
        array = np.asarray(value) if array is None else array
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"{name} cannot be turned into one array: {error}") from error
    if array.ndim == 0:
        raise UsageError(
            f"{name} is a single {type(value).__name__}; expected an array whose first dimension is the number of "
            "examples."
        )
    foreign = _not_numbers_or_texts(array)
    if foreign is not None:
        raise UsageError(
            f"{name} holds {foreign}, not numbers or strings. Make its columns or rows numeric and of equal length."
        )
    return array


def _not_numbers_or_texts(array: np.ndarray) -> str | None:
    """Describe values that TensorFlow takes neither as numbers nor as strings; None if there are none."""
    if array.dtype.kind == "O":
        others = (type(v).__name__ for v in array.flat if not isinstance(v, str | bytes))
        found = next(others, None)
        return found and f"Python objects ({found})"
    if array.dtype.kind in "mM" or array.dtype.names is not None:
        return f"values of type {array.dtype}"
    return None


def _from_pandas(value: Any, name: str) -> np.ndarray | None:
    """Convert a DataFrame to (n, columns); a Series to (n, 1), as Keras does, but weights to (n,)."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, pandas.DataFrame | pandas.Series):
        return None
    array = value.to_numpy()
    if isinstance(value, pandas.Series):
        return array if name.startswith("sample_weight") else array[:, np.newaxis]
    # to_numpy makes Python objects of mixed numbers and booleans, and of pandas's nullable types.
    types = [getattr(column, "numpy_dtype", column) for column in value.dtypes]
    if array.dtype.kind == "O" and all(getattr(t, "kind", "O") in "biuf" for t in types):
        return value.to_numpy(np.result_type(*types))
    return array
