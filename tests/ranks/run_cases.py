"""What each rank of a pool runs: `run_cases.py FOLDER REFERENCES` takes one case after another (see pool.py).

Between cases all is put back that a case may leave behind: Keras's session and settings, seeds, patches, the
environment, Horovod's process sets, the numbers in names of collectives, and the modules of cases themselves.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import json
import math
import os
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import results

from hvdtrain import runtime

CASES = Path(__file__).with_name("cases")
LEFT_OUT = ("matplotlib", "sklearn")
"""Modules that Keras imports if it finds them, for plots and wrappers, which takes a quarter of a rank's start."""


def main() -> None:
    folder, references = map(Path, sys.argv[1:])
    sys.modules.update(dict.fromkeys(LEFT_OUT))  # As if they were not installed.
    rank = runtime.init().rank
    for name in LEFT_OUT:
        del sys.modules[name]  # A case may import them.
    # On a busy machine any rank may be named as slow, where a test expects no warning.
    importlib.import_module("hvdtrain.trainer.stragglers").LEAST_SECONDS = math.inf
    launched_by = psutil.Process().parent()
    sys.path[:0] = [str(CASES), str(CASES.parents[1])]
    # What was imported stays: looking through it for garbage takes a tenth of the time of cases.
    gc.freeze()
    before = dict(os.environ)
    (folder / f"rank{rank}.part").write_text(str(os.getpid()))
    (folder / f"rank{rank}.part").rename(folder / f"rank{rank}.pid")
    for number in itertools.count():
        job = _wait_for(folder / f"job{number}.json", launched_by)
        os.environ.update(job["env"] | {"TEST_CASE": f"{job['module']}.{job['case']}"})
        try:
            result = {"value": _run(job, references)}
            results.write(folder / f"job{number}.rank{rank}.json", result)
        except BaseException:
            result = {"error": traceback.format_exc()}
            results.write(folder / f"job{number}.rank{rank}.json", result)
            sys.exit(1)
        _reset(before, number + 1)


def _wait_for(path: Path, launcher: psutil.Process | None) -> dict[str, Any]:
    while not path.exists():
        if launcher is None or not launcher.is_running():
            sys.exit(1)
        time.sleep(0.01)
    return json.loads(path.read_text())


def _run(job: dict[str, Any], references: Path) -> Any:
    _add_process_sets(job["env"].get("TEST_MESHES", ""))
    value = getattr(importlib.import_module(job["module"]), job["case"])()
    importlib.import_module("references").compute_all(references)
    return value


def _add_process_sets(text: str) -> None:
    """Add the process sets of several meshes: "DATA,TENSOR,PIPELINE;..."."""
    if not text:
        return
    from hvdtrain.collectives.mesh import Mesh

    meshes = [Mesh(*map(int, one.split(","))) for one in text.split(";")]
    groups = {tuple(group) for mesh in meshes for group in mesh.rank_lists(mesh.size)}
    for group in sorted(groups):
        runtime.load_horovod().add_process_set(group)


def _remove_process_sets() -> None:
    from horovod.common import process_sets

    known = process_sets._basics._get_process_set_ids_and_ranks()
    for number, ranks in sorted(known.items()):
        if number:
            found = process_sets.ProcessSet(ranks)
            found.process_set_id = number
            process_sets.remove_process_set(found)


def _reset(environment: dict[str, str], number: int) -> None:
    """Put all back before case `number`. A collective."""
    import keras

    mock.patch.stopall()
    os.environ.clear()
    os.environ.update(environment)
    _remove_process_sets()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).parent == CASES:
            del sys.modules[name]
        elif name.split(".")[0] == "hvdtrain":
            # Ranks that did different things go on counting from the same number.
            begin = 1_000_000 * number
            for counter, value in list(vars(module).items()):
                if isinstance(value, itertools.count):
                    setattr(module, counter, itertools.count(begin))
                elif isinstance(value, defaultdict):
                    value.clear()
                    value.default_factory = functools.partial(itertools.count, begin)
    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(number)
    gc.collect()


if __name__ == "__main__":
    main()
