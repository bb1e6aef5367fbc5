"""The program of `hvdtrain verify`, on each rank: runs a script, and records the first steps of its Trainer's fits.

python -m hvdtrain.verify.recorded_run FOLDER STEPS forwards|backwards SCRIPT [ARGUMENTS]...
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.worker.main_module import run_script

FORWARDS, BACKWARDS = "forwards", "backwards"
SEED = 0
"""Of Python, NumPy and Keras when the script begins: what it draws from these is the same in each run."""


def main() -> None:
    """Run the script up to the last step to record.

    Raises:
        UsageError: It trains no step with a Trainer.
    """
    folder, steps, order, script = sys.argv[1:5]
    sys.argv = sys.argv[4:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    import keras

    from hvdtrain.verify.step_recorder import EnoughSteps, Recorder, recorded_fits

    keras.utils.set_random_seed(SEED)
    recorder = Recorder(Path(folder), int(steps), order == BACKWARDS)
    with contextlib.suppress(EnoughSteps), recorded_fits(recorder):
        run_script(script)
    if not recorder.steps:
        raise UsageError(
            f"{script} ended without a step of hvdtrain.Trainer's fit, whose steps are what is compared. Those of "
            "model.fit and of loops of your own are not recorded"
        )


if __name__ == "__main__":
    main()
