"""`hvdtrain.launch(function, np=2)`: run a Python function on several ranks, from a script, a REPL or a notebook.

The ranks are started, monitored and ended as in `hvdtrain run`; the program that they run fetches the function.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any, get_args

from hvdtrain.environment import EXIT_SIGNAL_BASE, HANG_SECONDS
from hvdtrain.errors import LaunchError, UsageError
from hvdtrain.launch.env_forwarding import EnvVar
from hvdtrain.launch.hosts import parse_hosts
from hvdtrain.launch.installed_horovod import choose_controller, installed_controllers
from hvdtrain.launch.launch_command import check_started_once, this_site
from hvdtrain.launch.launchers import find_launcher
from hvdtrain.launch.plan import Controller, LaunchPlan
from hvdtrain.launch.rank_program import Program
from hvdtrain.launch.running.function_server import FunctionServer
from hvdtrain.launch.running.outcome import Outcome
from hvdtrain.launch.running.session import OutputOptions, RunLimits, run_launch
from hvdtrain.launch.running.watchdog import limits_of
from hvdtrain.worker.signed_messages import ADDRESS, KEY

_GRACE_SECONDS = 30.0


def launch(
    function: Callable[..., Any],
    np: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    hosts: str | None = None,
    *,
    controller: str = "auto",
    all_ranks: bool = False,
    log_dir: str | Path | None = None,
    hang_timeout: float = HANG_SECONDS,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on `np` ranks and return the results of all ranks.

    Args:
        function: Any function that cloudpickle can pickle, including one defined in a notebook cell.
        np: Number of ranks.
        args: Positional arguments, the same on all ranks.
        kwargs: Keyword arguments, the same on all ranks.
        hosts: Hosts with their slots, such as "node1:4,node2:4". None uses this machine.
        controller: "auto", "mpi" or "gloo".
        all_ranks: Whether to show the output of all ranks instead of rank 0's alone.
        log_dir: Folder for the output of every rank. None creates one in .hvdtrain/logs.
        hang_timeout: Seconds without progress after which the run is ended; 0 disables the limit.

    Returns:
        A list with the return value of each rank, in rank order.

    Raises:
        UsageError: An argument is invalid or cannot be pickled, or the call is not made from the main thread.
        EngineError: Horovod is not installed, or supports neither MPI nor Gloo on this machine.
        LaunchError: A rank failed, or ended without a result that can be unpickled here.
        KeyboardInterrupt: The user pressed Ctrl-C or the notebook's stop button. The ranks are ended. SIGTERM and
            SIGHUP end them, too, and then this process, unless it handles the signal.
    """
    check_started_once(os.environ)
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "hvdtrain.launch must be called from the main thread, which receives Ctrl-C"
        )
    _require("np", np, type(np) is int and np >= 1, "pass a whole number, at least 1")
    is_sequence = isinstance(args, Sequence) and not isinstance(args, (str, bytes))
    _require("args", args, is_sequence, "pass a list or tuple")
    _require("kwargs", kwargs, isinstance(kwargs, Mapping | None), "pass a dict")
    for name in kwargs or {}:
        _require("kwargs", name, isinstance(name, str), "its keys are names")
    _require("hosts", hosts, isinstance(hosts, str | None), "pass a string: 'node1:4,node2:4'")
    known = ("auto", *get_args(Controller))
    _require("controller", controller, controller in known, f"choose one of {', '.join(known)}")
    is_path = isinstance(log_dir, str | Path | None) and "\0" not in str(log_dir)
    _require("log_dir", log_dir, is_path, "pass the path of a folder")
    is_limit = isinstance(hang_timeout, Real) and 0 <= hang_timeout < inf
    _require("hang_timeout", hang_timeout, is_limit, "pass a number of seconds, or 0 for no limit")
    site = this_site()
    places = parse_hosts(hosts) if hosts else ()
    plan = LaunchPlan(
        program=Program(Path("hvdtrain.worker.function_rank"), kind="module"),
        np=np,
        controller=choose_controller(controller, installed_controllers(), site.mpirun),
        hosts=places,
        # The values are passed only in the environment.
        env=(EnvVar(ADDRESS), EnvVar(KEY)),
    )
    other = next((place.name for place in places if place.name not in site.names), None)
    outcomes: list[tuple[Outcome, Path, signal.Signals | None]] = []
    with FunctionServer(_pickled(function, args, kwargs or {}), other) as server:
        prepared = find_launcher(plan.launcher)(plan, site)
        run_launch(
            prepared.argv,
            OutputOptions(
                Path(log_dir) if log_dir else None,
                all_ranks,
                command=f"hvdtrain.launch({_name(function)}, np={np})",
            ),
            RunLimits(_GRACE_SECONDS, limits_of(hang_timeout, plan) if hang_timeout else None),
            environ=prepared.environment({**os.environ, **server.caller.variables()}),
            on_outcome=lambda *outcome: outcomes.append(outcome),
        )
    outcome, folder, received = outcomes[-1]
    if received is not None:
        _pass_on(received, folder)
    _check(outcome, folder, [rank for rank in range(np) if rank not in server.results])
    return [_unpickled(server.results[rank], rank, folder) for rank in range(np)]


def _require(name: str, value: object, is_valid: bool, wanted: str) -> None:
    if not is_valid:
        raise UsageError(f"hvdtrain.launch({name}={value!r}): {wanted}")


def _pickled(function: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    if not callable(function):
        raise UsageError(f"hvdtrain.launch: {function!r} is not a function")
    import cloudpickle

    parts = [("the function", function), *((f"args[{at}]", one) for at, one in enumerate(args))]
    parts += [(f"kwargs[{name!r}]", one) for name, one in kwargs.items()]
    try:
        call = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:
        what = next((name for name, one in parts if not _can_pickle(one)), "the call")
        raise UsageError(
            f"hvdtrain.launch: {what} cannot be pickled ({error}): open files, locks and "
            "connections inside the function"
        ) from error
    # Python, too, ignores what is no string.
    folders = [str(Path(folder).absolute()) for folder in sys.path if isinstance(folder, str)]
    return pickle.dumps((folders, call))


def _unpickled(result: bytes, rank: int, log_dir: Path) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:
        raise LaunchError(
            f"the result of rank {rank} cannot be unpickled here ({type(error).__name__}: {error}): return numbers, "
            f"arrays, or containers of these\nlogs of all workers: {log_dir}",
            rank,
            0,
            "",
            log_dir,
        ) from error


def _can_pickle(thing: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(thing)
    except Exception:
        return False
    return True


def _pass_on(received: signal.Signals, log_dir: Path) -> None:
    """Let this process, too, receive a signal that has ended the run.

    Raises:
        KeyboardInterrupt: It was SIGINT.
        LaunchError: A handler of the caller's lets the process go on.
    """
    signal.raise_signal(received)
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    message = f"the run was ended by {received.name}\nlogs of all workers: {log_dir}"
    raise LaunchError(message, None, EXIT_SIGNAL_BASE + received, "", log_dir)


def _check(outcome: Outcome, log_dir: Path, missing: Sequence[int]) -> None:
    """Raise the exception for a run that failed, or lacks results."""
    if outcome.exit_code:
        message = outcome.message or f"the run was ended (exit code {outcome.exit_code})"
        raise LaunchError(message, outcome.rank, outcome.exit_code, outcome.traceback, log_dir)
    if missing:
        raise LaunchError(
            f"rank {missing[0]} ended without a result: its function called sys.exit or os._exit "
            "instead of returning\n"
            f"logs of all workers: {log_dir}",
            missing[0],
            0,
            "",
            log_dir,
        )


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
