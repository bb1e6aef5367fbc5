"""The program that each rank runs: `python -m hvdtrain.worker script.py ...` prepares the process and runs the script.

With `-m` before the name it runs a module, with `--program` it becomes another program.

Before TensorFlow is loaded, it divides the cores between the ranks of the host, and gives all ranks the same string
hashes. When the script fails, it reports the reason once (see `hvdtrain.worker.failure_report`) and ends the process at
once: in the interpreter's normal shutdown, a rank that raised may wait forever in Horovod's or MPI's shutdown for
ranks that wait for it.

SIGTERM keeps its default action, which also ends a rank that is blocked inside a collective, where no Python handler
would run.
"""

import atexit
import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from hvdtrain.environment import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    HASH_SEED,
    LAUNCH_ID,
    START_FOLDER,
    TERMINAL,
)
from hvdtrain.errors import HvdtrainError
from hvdtrain.host_limits import available_cores
from hvdtrain.rank_variables import RENDEZVOUS_ADDRESS, is_elastic, rank_of, size_of
from hvdtrain.standard_streams import write_all
from hvdtrain.strategy_names import PARAMETER_SERVER, STRATEGY
from hvdtrain.worker import (
    elastic_notifications,
    launcher_watch,
    main_module,
    missing_allreduce,
    phases,
    preemption_notice,
)
from hvdtrain.worker.failure_report import Failure, encoded, is_secondary, text_of
from hvdtrain.worker.heartbeat import beat
from hvdtrain.worker.import_hooks import TENSORFLOW_FIRST, on_import
from hvdtrain.worker.output_frames import frame_output
from hvdtrain.worker.rank_environment import rank_environment
from hvdtrain.worker.secret_files import delivered

CLEAN_UP_SECONDS = 1.0
_NO_INPUT = "EOF when reading a line"  # Of input().
MODULE, PROGRAM = "-m", "--program"
_RUNNER = str(Path(__file__).with_name("function_rank.py"))
_ADOPTER = str(Path(__file__).parents[1] / "adopt" / "__main__.py")
OWN_FILES = {__file__, main_module.__file__, runpy.__file__, "<frozen runpy>", _RUNNER, _ADOPTER}


def main() -> None:
    """Prepare this process and run the script; a failure is reported and ends the process."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m hvdtrain.worker [-m | --program] SCRIPT [ARGUMENTS]...")
    try:
        _run()
    except KeyboardInterrupt:
        _end(EXIT_INTERRUPTED)


def _run() -> None:
    _restart_with_hash_seed()
    beat("starting")
    _install_signal_handlers()
    kind = sys.argv[1] if sys.argv[1] in {MODULE, PROGRAM} else ""
    words = sys.argv[2:] if kind else sys.argv[1:]
    preemption_notice.listen(rank_of(os.environ))
    _take_delivery()
    if LAUNCH_ID in os.environ and RENDEZVOUS_ADDRESS in os.environ:
        launcher_watch.end_when_orphaned()
    if LAUNCH_ID in os.environ and is_elastic(os.environ):
        elastic_notifications.listen_at_interface()
    os.environ.update(rank_environment(os.environ, available_cores()))
    with contextlib.suppress(OSError):  # The folder has been removed.
        os.environ[START_FOLDER] = str(Path.cwd())
    if kind == PROGRAM:
        _become(words)
    _prepare_output()
    sys.argv, script = words, words[0]
    try:
        folder = str(Path.cwd() if kind == MODULE else Path(script).resolve().parent)
    except OSError as error:
        _fail(
            EXIT_USAGE,
            False,
            f"{script}: the working folder cannot be used: {error.strerror} (on this rank's host)",
        )
    # Python puts the working folder there, and with -P nothing. hvdtrain's own modules run a script or a function of
    # the user's, which imports from elsewhere.
    unsearched = main_module.is_path_safe() or (kind == MODULE and script.startswith("hvdtrain."))
    sys.path[: 0 if sys.flags.safe_path else 1] = [] if unsearched else [folder]
    if kind != MODULE and not Path(script).is_file():
        place = os.environ.get(START_FOLDER, folder)
        _fail(EXIT_USAGE, False, f"no such script: {script} (in {place}, on this rank's host)")
    watching = missing_allreduce.watch()
    on_import(TENSORFLOW_FIRST, phases.HOOKS, *([watching.hooks] if watching else []))
    try:
        if kind == MODULE:
            main_module.run_module(script)
        else:
            main_module.run_script(script)
    except KeyboardInterrupt:
        raise
    except SystemExit as request:
        _exit_as_asked(request.code)
    except HvdtrainError as error:
        _fail(error.exit_code, is_secondary(error), text_of(error))
    except BaseException as error:
        _fail(EXIT_FAILURE, is_secondary(error), script_traceback(error) + _hint(error))
    beat("ended")
    if watching is not None and watching.complaint():
        missing_allreduce.say(watching.complaint())
    if os.environ.get(STRATEGY) == PARAMETER_SERVER:
        # TensorFlow's destructors would contact every worker, and wait forever for a dead one.
        _wait_for_threads()
        _end(0)


def _become(words: list[str]) -> NoReturn:
    """Replace this process by a program that is not a Python script, with the rank's environment.

    A file in the working folder takes precedence over PATH. The heartbeat ends here, so the program's end is not noted.
    """
    beat("ended")
    try:
        os.execvp(Path(words[0]).absolute() if Path(words[0]).is_file() else words[0], words)
    except OSError as error:
        _fail(EXIT_USAGE, False, f"cannot start {words[0]}: {error.strerror} (on this rank's host)")


def _restart_with_hash_seed() -> None:
    """Restart this program in the same process with PYTHONHASHSEED set, unless the user has set it.

    Python hashes strings differently in each process, so a script that iterates over a set of names would do so in
    another order on each rank. The interpreter reads the variable only at its start; `hvdtrain run` sets it
    beforehand, which saves the 60 ms of a restart.
    """
    if HASH_SEED not in os.environ:
        os.environ[HASH_SEED] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _install_signal_handlers() -> None:
    """On SIGUSR2, print the stacks of all threads on standard error; on Ctrl-C, note the phase and interrupt."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    beat("stopping")
    raise KeyboardInterrupt


def _wait_for_threads() -> None:
    """Wait for the script's threads, as the interpreter does before it exits."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _take_delivery() -> None:
    """Set the secret variables that were sent to this host, overriding values from its login shell."""
    launch_id = os.environ.get(LAUNCH_ID)
    if launch_id is None:
        return
    try:
        os.environ.update(delivered(launch_id))
    except (HvdtrainError, OSError, ValueError) as error:
        _fail(EXIT_FAILURE, False, f"cannot read the secret variables for this host: {error}")


def script_traceback(error: BaseException) -> str:
    """Return the traceback from the script's first frame on, without hvdtrain's frames before it."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in OWN_FILES:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def _hint(error: BaseException) -> str:
    """Return what to do about an error that only ranks get. Empty for others."""
    if isinstance(error, EOFError) and text_of(error) == _NO_INPUT and rank_of(os.environ):
        return (
            "\nStandard input goes to rank 0 only: pass what all ranks need in arguments or a file"
        )
    return ""


def _prepare_output() -> None:
    """Flush output at each line; let only rank 0 report a terminal, if there is one."""
    frame_output(os.environ)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    terminal = os.environ.get(TERMINAL)
    if terminal is not None:
        # Progress bars ask this. mpirun gives every rank a pseudo-terminal, horovodrun --gloo gives none.
        for stream, descriptor in ((sys.stdout, "1"), (sys.stderr, "2")):
            answer = descriptor in terminal and rank_of(os.environ) == 0
            if stream is not None:
                stream.isatty = partial(bool, answer)  # type: ignore[method-assign]


def _exit_as_asked(code: object) -> None:
    """Exit like `sys.exit(code)`: an integer is the exit code, None is success, anything else a message with code 1."""
    if code is None or code == 0:
        return
    if isinstance(code, int):
        _fail(code & 0xFF or EXIT_FAILURE, False, "")
    _fail(EXIT_FAILURE, False, text_of(code))


def _fail(exit_code: int, secondary: bool, text: str) -> NoReturn:
    failure = Failure(rank_of(os.environ), exit_code, secondary, text, size_of(os.environ))
    # Nobody reads reports if the user has pasted the launch command.
    under_launcher = TERMINAL in os.environ
    _flush()
    if under_launcher or text:
        # With a leading newline, because the script may have left a line unfinished.
        line = f"\n{failure.to_line()}\n" if under_launcher else f"{text}\n"
        with contextlib.suppress(OSError):
            write_all(2, encoded(line))
    _end(exit_code)


def _end(exit_code: int) -> NoReturn:
    """End the process now. Exit functions get CLEAN_UP_SECONDS, as those of Horovod and MPI may block forever."""
    beat("ended")
    cleaning = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    cleaning.start()
    cleaning.join(CLEAN_UP_SECONDS)
    _flush()
    os._exit(exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
