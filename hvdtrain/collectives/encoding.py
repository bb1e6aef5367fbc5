"""Encoding of Python objects as bytes, to send them between ranks and restore them exactly, without pickle.

The bytes are the length of a JSON text, the text, and the binary data. In the text, numbers, strings, None and lists
stand for themselves; any other value is an object with one entry, its kind:

    {"tuple": [1, 2]}    {"dict": [[key, value], ...]}    {"bytes": length}    {"array": [dtype, shape]}
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from hvdtrain.errors import UsageError

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_LENGTH_BYTES = 8


def encode(value: Any) -> bytes:
    """Return `value` as bytes; see `encoded_parts` for its types and the errors."""
    return b"".join(encoded_parts(value))


def encoded_parts(value: Any) -> list[Any]:
    """Return the encoding of `value` as a list of bytes-like objects, without copies of its contiguous arrays.

    Args:
        value: None, bool, int, float, str, bytes, NumPy arrays and scalars, and lists, tuples, sets and dicts of
            these. Subclasses are not accepted, as they would not be restored.

    Raises:
        UsageError: `value` holds an object of another type (the message says where), or is nested too deeply.
    """
    blobs: list[Any] = []
    try:
        text = json.dumps(_to_tree(value, "", blobs)).encode()
    except RecursionError:
        raise UsageError("it is nested too deeply, or contains itself") from None
    except ValueError as error:  # Integers of more than 4300 digits, among others.
        raise UsageError(str(error)) from None
    return [len(text).to_bytes(_LENGTH_BYTES, "little"), text, *blobs]


def decode(data: bytes | memoryview) -> Any:
    """Return the value that `encode` has encoded as `data`."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    return _Decoder(data, end).value(json.loads(bytes(data[_LENGTH_BYTES:end])))


def _to_tree(value: Any, place: str, blobs: list[Any]) -> Any:
    """Return the JSON form of `value`, found at `place`, and append its binary data to `blobs`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_to_tree(v, f"{place}[{n}]", blobs) for n, v in enumerate(value)]
    if kind is dict:
        items = [
            [_to_tree(k, f"{place} key {k!r}", blobs), _to_tree(v, f"{place}[{k!r}]", blobs)]
            for k, v in value.items()
        ]
        return {"dict": items}
    for name, sequence in _SEQUENCES.items():
        if kind is sequence:
            return {name: [_to_tree(v, f"{place}[{n}]", blobs) for n, v in enumerate(value)]}
    if kind is bytes:
        blobs.append(value)
        return {"bytes": len(value)}
    if kind is np.ndarray or isinstance(value, np.generic):
        name = "array" if kind is np.ndarray else "scalar"
        dtype = _dtype_name(value.dtype, place)
        # Not a memoryview of the array, which does not support bfloat16.
        blobs.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return {name: [dtype, list(value.shape)]}
    raise UsageError(f"{_found(place)} a {kind.__module__}.{kind.__qualname__}")


def _dtype_name(dtype: np.dtype, place: str) -> str:
    """Return a name from which np.dtype restores `dtype`."""
    for name in (dtype.str, dtype.name):  # dtype.name is for bfloat16 and other extension types.
        try:
            if np.dtype(name) == dtype and not dtype.hasobject:
                return name
        except TypeError:
            continue
    raise UsageError(f"{_found(place)} an array of dtype {dtype}")


def _found(place: str) -> str:
    return f"{place.strip()} is" if place else "it is"


class _Decoder:
    """Restores values from the JSON tree and the binary data after it, in the order of `encode`."""

    def __init__(self, data: bytes | memoryview, position: int) -> None:
        self._data = data
        self._position = position

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(part) for part in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "dict":
            return {self.value(key): self.value(value) for key, value in content}
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.value(part) for part in content)
        if kind == "bytes":
            return bytes(self._take(content))
        name, shape = content
        dtype = np.dtype(name)
        bits = self._take(dtype.itemsize * math.prod(shape))
        array = np.frombuffer(bits, dtype).reshape(shape).copy()
        return array if kind == "array" else array[()]

    def _take(self, length: int) -> bytes | memoryview:
        start, self._position = self._position, self._position + length
        return self._data[start : self._position]
