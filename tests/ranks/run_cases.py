"""What each rank of `launch.run_cases` runs: `run_cases.py NAME FOLDER [CASE]...`."""

import contextlib
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from hvdtrain import runtime


def _start_with_meshes(text: str) -> None:
    """Start Horovod with the process sets of several meshes: "DATA,TENSOR,PIPELINE;..."."""
    if not text:
        return
    from hvdtrain.parallel.mesh import Mesh

    hvd = runtime.load_horovod()
    meshes = [Mesh(*map(int, one.split(","))) for one in text.split(";")]
    groups = {tuple(group) for mesh in meshes for group in mesh.rank_lists(mesh.size)}
    runtime.start_horovod(process_sets=[hvd.ProcessSet(group) for group in sorted(groups)])


def _wait_for_all() -> None:
    """The first rank to shut Horovod down takes it away from those that are still at a case."""
    import tensorflow as tf

    hvd = runtime.load_horovod()
    # A case may have ended Horovod already.
    with contextlib.suppress(Exception):
        hvd.allreduce(tf.constant(0.0), name="end_of_cases")


def main() -> None:
    name, folder, *only = sys.argv[1:]
    _start_with_meshes(os.environ.get("TEST_MESHES", ""))
    rank = runtime.init().rank
    here = Path(__file__).parent
    sys.path[:0] = [str(here / "cases"), str(here.parent)]
    module = importlib.import_module(name)
    cases = {
        n: f for n, f in vars(module).items() if n.startswith("case_") and (not only or n in only)
    }
    results: dict[str, dict[str, Any]] = {}
    path = Path(folder) / f"rank{rank}.json"
    for case in only or cases:
        try:
            results[case] = {"value": cases[case]()}
        except BaseException:
            results[case] = {"error": traceback.format_exc()}
        # After each one: what was reached survives a rank that hangs later and is killed.
        path.write_text(json.dumps(results))
        if "error" in results[case]:
            sys.exit(1)
    _wait_for_all()
    runtime.shutdown()


if __name__ == "__main__":
    main()
