"""Run an ordinary Keras script on every rank, with its fits shared among them:

python -m hvdtrain.adopt SCRIPT [ARGUMENTS]...

Every rank runs the whole script. What `model.fit` trains is divided over the ranks by a Trainer; everything else is
computed by all of them, with the same result. Rank 0 works in the user's folder, the others in private copies of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.environment import TERMINAL
from hvdtrain.errors import UsageError
from hvdtrain.runtime import init
from hvdtrain.worker.main_module import is_path_safe, run_script

SEED = 0
"""Of Python, NumPy and Keras when the script begins, so that all ranks draw the same numbers."""


def main() -> None:
    """Run the script in the arguments.

    Raises:
        UsageError: There is none.
    """
    words = sys.argv[1:]
    if not words:
        raise UsageError("usage: python -m hvdtrain.adopt SCRIPT [ARGUMENTS]...")
    run_adopted(words[0], words[1:])


def run_adopted(script: str, arguments: Sequence[str]) -> None:
    """Run `script` on this rank. Raises what the script raises."""
    rank = init(SEED)
    from hvdtrain.adopt.fits import adopted_fits
    from hvdtrain.adopt.notes import Notes
    from hvdtrain.adopt.once import done_once
    from hvdtrain.adopt.private_folder import private_folder
    from hvdtrain.adopt.random_maps import random_maps_in_order
    from hvdtrain.adopt.same_seeds import same_seeds
    from hvdtrain.adopt.shared_steps import shared_steps

    with contextlib.ExitStack() as blocks:
        folder = blocks.enter_context(private_folder(rank))
        if not rank.is_first:
            _become_silent()
        notes = Notes(rank, str(Path(script).absolute()))
        blocks.enter_context(done_once())
        blocks.enter_context(same_seeds(SEED))
        blocks.enter_context(random_maps_in_order())
        fits = blocks.enter_context(adopted_fits(rank, notes, folder))
        blocks.enter_context(shared_steps(notes, fits, Path(script).absolute().parent))
        sys.argv = [script, *arguments]
        if not is_path_safe():
            sys.path[0:0] = [str(Path(script).absolute().parent)]
        run_script(script)


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
