"""What Horovod's autotuning found in an earlier run of the same script, for the next one.

Horovod's log has a line for each sample and, once the tuning has ended, the best one again. Its scores are bytes per
microsecond.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hvdtrain.launch.option_types import options_of
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.plan_validation import unmet_need

FOLDER = Path(".hvdtrain/autotune")
"""Folder of the logs, in the working directory."""
_SEARCH = "autotune"


def with_tuning(
    plan: LaunchPlan, say: Callable[[str], None], *, dry_run: bool = False
) -> LaunchPlan:
    """Return the plan with what an earlier run has found in place of --autotune, or else with a log to find it in.

    Options that the user gave keep their values. Elastic jobs are tuned in every run, as their workers change. A dry
    run creates no folder for the logs.
    """
    if not plan.autotune or plan.autotune_log_file is not None or plan.elastic:
        return plan
    log = FOLDER / f"{_key(plan)}.csv"
    found = read_log(log)
    if found is None:
        if dry_run and not os.access(FOLDER, os.W_OK | os.X_OK):
            say(f"--autotune: a run also saves the values that Horovod finds to {log}, if it can")
            return plan
        try:
            if not dry_run:
                FOLDER.mkdir(parents=True, exist_ok=True)
                log.touch()  # Horovod does not report a log that it cannot write.
        except OSError as error:
            say(
                f"--autotune: not saving the values that Horovod finds, as {log} cannot be written "
                f"({error.strerror}): the next run has to find them again"
            )
            return plan
        say(f"--autotune: saving the values that Horovod finds to {log}, for the next run")
        return replace(plan, autotune_log_file=log)
    say(f"--autotune: using the values found by an earlier run; remove {log} to tune again")
    search = {one.name: None for one in fields(plan) if one.name.startswith(_SEARCH)}
    taken = {
        option.field: found[option.field]
        for option in options_of(LaunchPlan)
        # Horovod also tries what has no effect on one host.
        if option.field in found
        and getattr(plan, option.field) is None
        and not unmet_need(option, plan)
    }
    return replace(plan, **search | taken)


def read_log(path: Path) -> dict[str, Any] | None:
    """Return the options of the best sample in Horovod's log, by name; None if the tuning has not ended."""
    try:
        with path.open(newline="") as file:
            rows = [
                {name: float(value) for name, value in row.items()} for row in csv.DictReader(file)
            ]
        *samples, best = rows
        if best not in samples or best["score"] < max(one["score"] for one in samples):
            return None
        found: dict[str, Any] = {
            "cycle_time_ms": best["cycle_time_ms"],
            "fusion_threshold_mb": round(best["tensor_fusion_threshold"]),
        }
        ways = ("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce")
        found |= {name: True for name in ways if best[name]}
        return found if best["cache_enabled"] else found | {"cache_capacity": 0}
    # Missing, or cut off by a crash.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _key(plan: LaunchPlan) -> str:
    """Return a name for what the values depend on: the script, its arguments, and how many ranks are on each host."""
    facts = [
        plan.program.kind,
        str(plan.program.name),
        *plan.program.arguments,
        plan.np,
        [host.slots for host in plan.hosts],
        plan.controller,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
