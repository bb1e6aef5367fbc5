"""The program that each rank of `hvdtrain.launch` runs: `python -m hvdtrain.worker -m hvdtrain.worker.function_rank`.

It fetches the function, calls it, and returns its result. Failures are reported as for any script.
"""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
from multiprocessing import AuthenticationError
from typing import Any

from hvdtrain.errors import HvdtrainError
from hvdtrain.rank_variables import rank_of
from hvdtrain.worker.signed_messages import ADDRESS, KEY, Caller, caller_of


def main() -> None:
    """Fetch the function, run it as this rank, and send the result.

    Raises:
        HvdtrainError: The caller cannot be reached, the function cannot be loaded here, or its result cannot be
            pickled.
    """
    caller = caller_of({name: os.environ.pop(name) for name in (ADDRESS, KEY)})
    rank = rank_of(os.environ)
    function, args, kwargs = _fetch(caller)
    result = function(*args, **kwargs)
    try:
        caller.give(rank, _pickled(result))
    except (OSError, EOFError, AuthenticationError) as error:
        raise HvdtrainError(
            f"cannot return the result to the caller of hvdtrain.launch: {error}"
        ) from error


def _fetch(caller: Caller) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    try:
        content = caller.function()
    except (OSError, EOFError, AuthenticationError) as error:
        raise HvdtrainError(
            f"cannot reach the caller of hvdtrain.launch at {caller.address}: {error}: "
            "is a firewall between the hosts?"
        ) from error
    folders, call = pickle.loads(content)
    sys.path[:] = _joined(folders, sys.path)
    try:
        found: tuple[Any, tuple[Any, ...], dict[str, Any]] = pickle.loads(call)
    except Exception as error:
        raise HvdtrainError(
            f"the function cannot be loaded on this rank ({type(error).__name__}: {error}): "
            "everything it uses must be importable on all hosts"
        ) from error
    return found


def _joined(callers: list[str], own: list[str]) -> list[str]:
    """Return the caller's path, then what else is in this rank's: a module is to be the same as there.

    The other way round if the caller's Python is not this one: another host may have it elsewhere.
    """
    first, last = (callers, own) if sysconfig.get_path("stdlib") in callers else (own, callers)
    return [*first, *(folder for folder in last if folder not in first)]


def _pickled(result: object) -> bytes:
    import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise HvdtrainError(
            f"the function returned a {type(result).__name__} that cannot be pickled ({error}): return "
            "numbers, arrays, or containers of these, or save it to a file"
        ) from error
    return content


if __name__ == "__main__":
    main()
