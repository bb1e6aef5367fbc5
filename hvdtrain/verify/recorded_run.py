"""The program of `hvdtrain verify`, on each rank: runs a script, and records its first steps.

python -m hvdtrain.verify.recorded_run FOLDER STEPS forwards|backwards as-is|adopted SCRIPT [ARGUMENTS]...
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.worker.main_module import run_script

FORWARDS, BACKWARDS = "forwards", "backwards"
AS_IS, ADOPTED = "as-is", "adopted"
SEED = 0
"""Of Python, NumPy and Keras when the script begins: what it draws from these is the same in each run."""


def main() -> None:
    """Run the script up to the last step to record.

    Raises:
        UsageError: It trains no step.
    """
    folder, steps, order, kind, script = sys.argv[1:6]
    sys.argv = sys.argv[5:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    import keras

    from hvdtrain.verify.loop_recorder import recorded_loops
    from hvdtrain.verify.step_recorder import EnoughSteps, Recorder, recorded_fits
    from hvdtrain.verify.written_files import recorded_files

    keras.utils.set_random_seed(SEED)
    recorder = Recorder(Path(folder), int(steps), order == BACKWARDS)
    with (
        contextlib.suppress(EnoughSteps),
        recorded_files(recorder.folder),
        recorded_fits(recorder),
        recorded_loops(recorder),
    ):
        if kind == ADOPTED:
            from hvdtrain.adopt.__main__ import run_adopted

            run_adopted(script, sys.argv[1:])
        else:
            run_script(script)
    if not recorder.steps:
        raise UsageError(f"{script} ended without a training step to compare")


if __name__ == "__main__":
    main()
