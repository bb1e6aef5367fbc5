"""What Horovod's autotuning found is taken by the next run of the same script."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdtrain.cli.command_table import main
from hvdtrain.launch.autotuning import FOLDER, read_log, with_tuning
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rank_program import Program

HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score\n"
)
# As Horovod writes them, with its space after the third comma.
SAMPLES = "0,0,0, 0,1.5,4,21.1353\n0,1,0, 0,12.5913,49.0767,45.7936\n0,0,0, 1,2.5,32,64.0133\n"
BEST = "0,0,0, 1,2.5,32,64.0133\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (HEADER + SAMPLES + BEST, {"cycle_time_ms": 2.5, "fusion_threshold_mb": 32}),
        (
            HEADER + "0,1,0, 0,12.5913,49.0767,9.5\n" * 2,
            {
                "cycle_time_ms": 12.5913,
                "fusion_threshold_mb": 49,
                "hierarchical_allgather": True,
                "cache_capacity": 0,
            },
        ),
        # The run ended before the tuning.
        (HEADER + SAMPLES, None),
        (HEADER, None),
        ("", None),
        (HEADER + SAMPLES + BEST[:9], None),
        (HEADER + SAMPLES + "0,0,0, 0,1.5,4,21.1353\n", None),
        ("a,b\n1,2\n1,2\n", None),
        (HEADER + BEST + "1,2,3,4,5,6,7,8\n", None),
        (HEADER + "x,0,0, 1,2.5,32,64.0133\n" * 2, None),
    ],
)
def test_the_last_line_of_a_finished_log_is_the_best(
    tmp_path: Path, text: str, found: dict[str, object] | None
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    assert read_log(path) == found
    assert read_log(tmp_path / "none.csv") is None


def test_the_next_run_takes_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def printed(*options: str, script: tuple[str, ...] = ("train.py",)) -> list[str]:
        base = ["run", "--dry-run", "-np", "2", "--controller", "gloo", "--autotune"]
        return shlex.split(
            CliRunner().invoke(main, [*base, *options, *script], prog_name="hvdtrain").stdout
        )

    assert "--autotune" in printed() and not Path(".hvdtrain").exists(), "a dry run writes nothing"
    FOLDER.mkdir(parents=True)
    first = printed("--autotune-warmup-samples", "1")
    log = Path(first[first.index("--autotune-log-file") + 1])
    assert "--autotune" in first and "--cycle-time-ms" not in first
    assert log.parent.is_dir() and printed().count(str(log)) == 1

    log.write_text(HEADER + SAMPLES + BEST)
    second = printed("--autotune-warmup-samples", "1")
    assert not [word for word in second if "autotune" in word]
    assert second[second.index("--cycle-time-ms") + 1] == "2.5"
    assert second[second.index("--fusion-threshold-mb") + 1] == "32"

    log.write_text(HEADER + "0,1,0, 0,12.5,48.6,9.5\n" * 2)
    third = printed()
    assert third[third.index("--cache-capacity") + 1] == "0"
    assert "--hierarchical-allgather" not in third, "it has no effect on one host"

    own = printed("--cycle-time-ms", "7")
    assert own[own.index("--cycle-time-ms") + 1] == "7.0"
    for other in (
        printed("--controller", "mpi"),
        printed("-np", "3"),
        printed("-H", "a:1,b:1"),
        printed(script=("train.py", "--layers", "9")),
        printed("--autotune-log-file", "mine.csv"),
    ):
        assert "--autotune" in other and str(log) not in other


def test_where_nothing_can_be_saved_the_run_is_tuned_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    plan = LaunchPlan(program=Program(Path("train.py")), np=2, controller="gloo", autotune=True)
    said: list[str] = []
    log = with_tuning(plan, said.append).autotune_log_file
    assert log is not None and log.parent == FOLDER and said[0].endswith(f"{log}, for the next run")
    shutil.rmtree(".hvdtrain")
    Path(".hvdtrain").touch()
    for dry_run in (False, True):
        assert with_tuning(plan, said.append, dry_run=dry_run) == plan
    assert "cannot be written (Not a directory): the next run has to find them" in said[1]
    assert f"saves the values that Horovod finds to {log}, if it can" in said[2]
