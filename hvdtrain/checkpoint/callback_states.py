"""Saves and restores the state of callbacks: epochs without improvement, best values, the history, log files.

For a callback with `get_state()` and `set_state(state)`, this is the state they exchange. For any other it is the
attributes that have changed since training began, as far as they are numbers, strings, arrays, or lists, tuples, sets
and dicts of these.
"""

from __future__ import annotations

import csv
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from hvdtrain.collectives.encoding import encode
from hvdtrain.errors import UsageError, warn_user
from hvdtrain.replaced_files import replacing

NOT_STATE = {"params", "min_delta"}
"""Attributes not to save: Keras sets params, and the sign of min_delta, in each process."""


class CallbackStates:
    """The states of the callbacks of one process.

    Args:
        callbacks: This rank's callbacks, after their on_train_begin.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self._callbacks = _named(callbacks)
        self._before = {
            name: {key: _encoded(value) for key, value in vars(callback).items()}
            for name, callback in self._callbacks.items()
        }
        self._warned: set[str] = set()

    def take(self) -> dict[str, Any]:
        """Return the states by name of the callback, in types that `encode` accepts."""
        return {name: self._state(name, callback) for name, callback in self._callbacks.items()}

    def give(self, states: Mapping[str, Any]) -> None:
        """Restore what `take` returned; a callback that it does not name keeps its initial state."""
        for name, callback in self._callbacks.items():
            if name not in states:
                continue
            if _speaks(callback):
                callback.set_state(states[name])
            else:
                vars(callback).update(states[name])

    def exchange_averages(self, states: Mapping[str, Any]) -> None:
        """Make a restored model hold averaged weights (SwapEMAWeights) if and only if it held them before.

        SwapEMAWeights swaps the weights and their averages at the ends of epochs.

        Args:
            states: What `take` returned when the restored weights were saved.
        """
        for name, callback in self._callbacks.items():
            if isinstance(callback, keras.callbacks.SwapEMAWeights):
                before = states.get(name, {}).get("_ema_weights_in_model", False)
                if before != callback._ema_weights_in_model:
                    callback._swap_variables()

    def _state(self, name: str, callback: Any) -> Any:
        if _speaks(callback):
            return callback.get_state()
        found, unknown = {}, []
        for key, value in vars(callback).items():
            now = _encoded(value)
            if key in NOT_STATE or now == self._before[name].get(key):
                continue
            if isinstance(now, bytes):
                found[key] = value
            elif key not in ("_model", "monitor_op"):
                unknown.append(key)
        if unknown and name not in self._warned and not _is_known(callback):
            self._warned.add(name)
            warn_user(
                f"{type(callback).__name__} changed {', '.join(unknown)} during training, which cannot be "
                "saved in a checkpoint: a resumed run would start with the callback's initial values. "
                "Implement get_state() and set_state(state) in the callback; the state may contain numbers, "
                "strings, arrays, lists and dicts"
            )
        return found


def continue_files(callbacks: Sequence[Any], epoch: int) -> None:
    """Let each CSVLogger append to its file, without the lines of epochs that will be trained again.

    Args:
        callbacks: Callbacks of rank 0.
        epoch: Index of the first epoch to train again, from 0.
    """
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.CSVLogger):
            continue
        path = Path(callback.filename)
        if not path.is_file():
            continue
        callback.append = True
        try:
            _drop_lines(path, callback.sep, epoch)
        except (OSError, UnicodeError, csv.Error) as error:
            warn_user(
                f"CSVLogger: {path} cannot be rewritten: {error}. Training continues; the lines of epochs that are "
                "trained again stay"
            )


def _drop_lines(path: Path, separator: str, epoch: int) -> None:
    """Remove the last lines of a CSV file that begin with a number of at least `epoch`."""
    with path.open(newline="") as file:
        kept = [row for row in csv.reader(file, delimiter=separator) if row]
    # Earlier lines may be another training's, in a file that is appended to.
    while kept and kept[-1][0].isdecimal() and int(kept[-1][0]) >= epoch:
        kept.pop()
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(kept)


def _named(
    callbacks: Sequence[keras.callbacks.Callback],
) -> dict[str, Any]:
    """Return callbacks by class name and a number within the class, so that adding one does not rename the others."""
    seen: Counter[str] = Counter()
    named = {}
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        named[f"{kind} {seen[kind]}"] = callback
    return named


def _encoded(value: Any) -> Any:
    """Return `value` as bytes; if it cannot be encoded, an object to detect its changes with."""
    try:
        return encode(value)
    except UsageError:
        return _looked_at(value)


def _looked_at(value: Any) -> Any:
    """Return an object that compares equal as long as `value` has not changed in place, if that is cheap to see.

    It compares the value's pickle, which is never unpickled, within this process.
    """
    if isinstance(value, keras.metrics.Metric):
        return _Same(value), encode([variable.numpy() for variable in value.variables])
    if callable(value) or type(value).__module__.partition(".")[0] in ("keras", "tensorflow"):
        return _Same(value)
    written = _Short()
    try:
        pickle.Pickler(written).dump(value)
    except Exception:  # Too large, or cannot be pickled.
        return _Same(value)
    return _Same(value), b"".join(written.parts)


class _Short:
    """A file that refuses more than MOST bytes, so that pickling into it takes little time."""

    MOST = 100_000

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: Any) -> None:
        self.parts.append(bytes(data))
        if sum(map(len, self.parts)) > self.MOST:
            raise ValueError("too long")


class _Same:
    """Equal for the same object; keeps it alive, so that no other object can get its id."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _speaks(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _is_known(callback: Any) -> bool:
    """Whether the callback is Keras's or hvdtrain's: their unsaved attributes are set again in each epoch."""
    return type(callback).__module__.partition(".")[0] in ("keras", "hvdtrain")
