"""Tracebacks filtered to the user's own code, as Keras filters them. Tested with Keras 3.15."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import keras
from keras.src.utils.traceback_utils import include_frame

Function = TypeVar("Function", bound=Callable[..., Any])

PACKAGE = str(Path(__file__).resolve().parents[1])


def without_library_frames(function: Function) -> Function:
    """Decorate `function` so that the tracebacks of its errors have no frames of Keras, TensorFlow and hvdtrain.

    keras.config.disable_traceback_filtering() turns this off.
    """

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if keras.config.is_traceback_filtering_enabled():
                _filter(error)
            raise

    return filtered  # type: ignore[return-value]


def _filter(error: BaseException) -> None:
    """Filter the traceback of `error`, and those of its causes."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        found.__traceback__ = _users_frames(found.__traceback__)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _users_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return the frames of `traceback` that are the user's; if there are none, its last frame."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    kept = [f for f in frames if _is_users(f.tb_frame.f_code.co_filename)] or frames[-1:]
    found = None
    for frame in reversed(kept):
        found = types.TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found


def _is_users(file: str) -> bool:
    return include_frame(file) and not file.startswith(PACKAGE)
