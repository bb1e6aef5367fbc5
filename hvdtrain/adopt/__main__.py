"""Run an ordinary Keras script on every rank, with its fits shared among them:

python -m hvdtrain.adopt [OPTIONS] SCRIPT [ARGUMENTS]...

Every rank runs the whole script. What `model.fit` trains is divided over the ranks by a Trainer; everything else is
computed by all of them, with the same result. Rank 0 works in the user's folder, the others in private copies of it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.adopt_options import BATCHES, SCALINGS, AdoptOptions
from hvdtrain.environment import TERMINAL
from hvdtrain.runtime import init
from hvdtrain.worker.main_module import is_path_safe, run_script

SEED = 0
"""Of Python, NumPy and Keras when the script begins, so that all ranks draw the same numbers."""
_AS_ON_ONE = AdoptOptions()


def main() -> None:
    """Run the script in the arguments."""
    parser = argparse.ArgumentParser("python -m hvdtrain.adopt", allow_abbrev=False)
    parser.add_argument("--batch", choices=BATCHES, default=BATCHES[0])
    parser.add_argument("--learning-rate", choices=SCALINGS, default=SCALINGS[0])
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    options = AdoptOptions(given.batch, given.learning_rate, given.explain)
    blocks = contextlib.ExitStack()
    try:
        _run(given.script, given.arguments, options, blocks)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            blocks.close()
        raise


def run_adopted(script: str, arguments: Sequence[str], options: AdoptOptions = _AS_ON_ONE) -> None:
    """Run `script` on this rank. Raises what the script raises."""
    with contextlib.ExitStack() as blocks:
        _run(script, arguments, options, blocks)


def _run(
    script: str, arguments: Sequence[str], options: AdoptOptions, blocks: contextlib.ExitStack
) -> None:
    """Run `script` in the context of `blocks`, which ends when they are closed: at the latest, when the process ends.

    The script's threads and exit functions also write in the private folder.
    """
    rank = init(SEED)
    atexit.register(blocks.close)  # Called after the functions of the script, which come later.
    from hvdtrain.adopt.fits import adopted_fits
    from hvdtrain.adopt.growth import Growth
    from hvdtrain.adopt.notes import Notes
    from hvdtrain.adopt.private_folder import private_folder
    from hvdtrain.adopt.same_way import SameWay
    from hvdtrain.adopt.script_calls import (
        done_once,
        late_settings_left_out,
        mirrored_by_workers,
        random_maps_in_order,
        same_seeds,
    )
    from hvdtrain.adopt.shared_steps import shared_steps

    folder = blocks.enter_context(private_folder(rank, Path(script)))
    script, *arguments = map(folder.own_path, [script, *arguments])
    if not rank.is_first:
        _become_silent()
    notes = Notes(rank, str(Path(script).absolute()), options.explain)
    notes.explain_start(
        f"{rank.size} workers run the whole of {script}",
        f"Python, NumPy and Keras begin with the seed {SEED} on all workers",
        f"rank 0 works in {Path.cwd()}, each other worker in a private copy",
        "only rank 0's output is shown, and only rank 0 opens windows of matplotlib",
    )
    way = SameWay(notes)
    blocks.enter_context(done_once(notes.explain, way))
    blocks.enter_context(late_settings_left_out(notes.explain))
    blocks.enter_context(mirrored_by_workers(notes.explain))
    blocks.enter_context(same_seeds(SEED, notes.explain))
    blocks.enter_context(random_maps_in_order(notes.explain))
    fits = blocks.enter_context(adopted_fits(rank, notes, folder, way, Growth(options)))
    blocks.enter_context(shared_steps(notes, fits, Path(script).absolute().parent))
    sys.argv = [script, *arguments]
    if not is_path_safe():
        sys.path[0:0] = [str(Path(script).absolute().parent)]
    try:
        run_script(script)
    except SystemExit as ended:
        if not ended.code:
            way.end()
        raise
    way.end()


def _become_silent() -> None:
    """Let this rank, which is not the first, open no window; and print nothing unless `hvdtrain run` keeps it apart."""
    os.environ["MPLBACKEND"] = "Agg"
    if TERMINAL not in os.environ:
        sys.stdout.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


if __name__ == "__main__":
    main()
