"""What each rank of `launch.run_cases` runs: `run_cases.py NAME FOLDER [CASE]...`."""

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from hvdtrain import runtime


def main() -> None:
    name, folder, *only = sys.argv[1:]
    rank = runtime.init().rank
    sys.path.insert(0, str(Path(__file__).parent / "cases"))
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
    runtime.shutdown()


if __name__ == "__main__":
    main()
