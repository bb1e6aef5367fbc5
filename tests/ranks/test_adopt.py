"""`hvdtrain run --adopt`: 60 scripts, as strangers write them, on two ranks beside one plain process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from launch import on_ranks

SCRIPTS = sorted(path.stem for path in (Path(__file__).parent / "adopted").glob("*.py"))
SAMPLE = [
    "backup_restore",
    "fraud_class_weight",
    "save_load_export",
    "siamese_contrastive",
    "triplet_train_step",
]
ALL = bool(os.environ.get("HVDTRAIN_ALL_CASES"))
ROUNDING = 1e-5
"""Relative: what the order of sums makes of some dozens of steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adopted")


def found(name: str, folder: Path) -> list[dict[str, Any]]:
    results = on_ranks("adopt", np=2, env={"SCRIPTS": name, "FOLDER": str(folder)})
    return [rank[name] for rank in results.of("case_scripts")]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS if ALL else SAMPLE)
def test_a_script_is_that_of_one_process(name: str, folder: Path) -> None:
    first, second = found(name, folder)
    assert first["weights"] < ROUNDING and second["weights"] < ROUNDING
    plain = {
        str(path.relative_to(folder / f"plain {name}"))
        for path in (folder / f"plain {name}").rglob("*")
    }
    assert first["files"] == sorted(plain)
    assert first["told"]
